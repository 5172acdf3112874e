"""Commits changed elements: exchanges them with what the weights hold at their places.

The same exchange again undoes it. Addresses stay, so captured graphs and views see the change.
All memory exists before the vote, so an exchange cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.graph import increment_version

from sglang_inflight.scheduler.update.changes.encoding import Part, bits_of, write_positions
from sglang_inflight.scheduler.update.rate import make_way

# Torch takes some microseconds to free a part. A thread in this keeps the interpreter.
_FREED_AT_ONCE = 256


class Exchange:
    """The changes of one update, prepared by the staging thread.

    The scheduler's thread makes the exchange, on the stream of the next forward, and the host
    waits for nothing. The commit's message orders the two threads.
    """

    def __init__(self, changes: Sequence[tuple[torch.Tensor, list[Part]]]) -> None:
        """``changes``: each changed weight with its parts. No element is in two parts."""
        self._weights = [weight for weight, _ in changes]
        self._parts = [(bits_of(weight), part) for weight, parts in changes for part in parts]
        self._is_live = False
        device = self._weights[0].device if self._weights else torch.device("cpu")
        self._make: Callable[[list[tuple[torch.Tensor, Part]]], None]
        if device.type == "cpu":
            self._make = _Reference(part for _, part in self._parts)
        else:
            from sglang_inflight.scheduler.update.changes.exchange_kernel import Launch

            self._make = Launch(self._parts)

    def make(self) -> int:
        """Exchange all parts, and return the bytes written into the weights.

        Parts on the wanted side are left alone: an exchange that was cut off can be completed.
        """
        wanted = not self._is_live
        self._make([(bits, part) for bits, part in self._parts if part.is_live is not wanted])
        self._is_live = wanted
        for weight in self._weights:
            if not weight.is_inference():
                # writes through ``.data`` do not count in the version, by which caches notice them
                increment_version(weight)
        return sum(part.values.nbytes for _, part in self._parts)

    def free(self) -> None:
        """Let go of the parts, with pauses for steps."""
        while self._parts:
            del self._parts[-_FREED_AT_ONCE:]
            make_way()


class _Reference:
    """The exchange in torch's own operations, within memory set aside beforehand."""

    def __init__(self, parts: Iterable[Part]) -> None:
        longest = 0
        longest_of: dict[torch.dtype, int] = {}
        for part in parts:
            count = len(part.values)
            longest = max(longest, count if part.offsets is not None else 0)
            longest_of[part.values.dtype] = max(longest_of.get(part.values.dtype, 0), count)
        self._at = torch.empty(longest, dtype=torch.int64)
        self._old = {dtype: torch.empty(count, dtype=dtype) for dtype, count in longest_of.items()}

    def __call__(self, parts: list[tuple[torch.Tensor, Part]]) -> None:
        for bits, part in parts:
            here = bits[part.start : part.start + part.length]
            old = self._old[part.values.dtype][: len(part.values)]
            if part.offsets is None:
                old.copy_(here)
                here.copy_(part.values)
            else:
                at = self._at[: len(part.values)]
                write_positions(part, at)
                torch.index_select(here, 0, at, out=old)
                here.index_copy_(0, at, part.values)
            part.values.copy_(old)
            part.is_live = not part.is_live
