"""Commits changed elements: exchanges them with what the weights hold at their places.

The same exchange again undoes it. Addresses stay, so captured graphs and views see the change.
All memory exists before the vote, so an exchange cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.graph import increment_version

from sglang_inflight.scheduler.update.changes.encoding import (
    Changes,
    Part,
    bits_of,
    write_positions,
)
from sglang_inflight.scheduler.update.rate import yield_gil
from sglang_inflight.vocabulary.errors import Refused


class Exchange:
    """The changes of one update, prepared by the staging thread.

    The scheduler's thread makes the exchange, on the stream of the next forward, and the host
    waits for nothing. The commit's message orders the two threads. On a device the scheduler's
    thread launches one kernel for each width of elements, however many changes there are.
    """

    def __init__(self, changes: Changes) -> None:
        """``changes``: each changed weight with its parts. No element is in two parts.

        Raises ``Refused`` if a commit could not read them all.
        """
        self._changes = list(changes)
        self._nbytes = sum(part.values.nbytes for _, parts in changes for part in parts)
        # writes through ``.data`` do not count in the version, by which caches notice a change
        self._counted = [weight for weight, _ in changes if not weight.is_inference()]
        device = changes[0][0].device if changes else torch.device("cpu")
        for weight, parts in changes:
            if weight.device != device or not all(p.is_readable_on(device) for p in parts):
                raise Refused(f"the changes of the update are in memory that {device} cannot read")
            yield_gil()
        self._exchange: Callable[[], None]
        if device.type == "cpu":
            self._exchange = _Reference(self._changes)
        else:
            from sglang_inflight.scheduler.update.changes.exchange_kernel import Launch

            self._exchange = Launch(self._changes, device)

    def make(self) -> int:
        """Exchange all parts, and return the bytes written into the weights."""
        self._exchange()
        increment_version(self._counted)
        return self._nbytes

    def free(self) -> None:
        """Let go of the parts, with pauses for steps: torch takes some microseconds for each.

        A later exchange raises, because its addresses are others' by then.
        """
        self._exchange = _is_freed
        while self._changes:
            self._changes.pop()
            yield_gil()


def _is_freed() -> None:
    raise RuntimeError("the changes of this exchange were freed")


class _Reference:
    """The exchange in torch's own operations, within memory set aside beforehand."""

    def __init__(self, changes: Changes) -> None:
        """``changes`` is held by the caller, who may empty it."""
        self._changes = changes
        longest = 0
        longest_of: dict[torch.dtype, int] = {}
        for part in (part for _, parts in changes for part in parts):
            count = len(part.values)
            longest = max(longest, count if part.offsets is not None else 0)
            longest_of[part.values.dtype] = max(longest_of.get(part.values.dtype, 0), count)
        self._at = torch.empty(longest, dtype=torch.int64)
        self._old = {dtype: torch.empty(count, dtype=dtype) for dtype, count in longest_of.items()}

    def __call__(self) -> None:
        for weight, parts in self._changes:
            bits = bits_of(weight)
            for part in parts:
                self._make(bits, part)

    def _make(self, bits: torch.Tensor, part: Part) -> None:
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
