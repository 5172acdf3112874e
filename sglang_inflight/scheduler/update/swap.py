"""How a commit swaps live weights and shadow: in two ways, of which neither allocates memory.

    where            what is swapped                        why
    a CPU            the pointers                           no graph holds them
    any other        the contents, through a spare piece    captured graphs hold the pointers

On a CPU, too, contents are swapped of a weight that something else lies in the memory of: a
view, wherever a model keeps it, would go on showing the old memory.

Contents are swapped on the current stream, and the host waits for nothing. What could go wrong
goes wrong in ``check`` and in making the spare piece, before the vote.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.autograd.graph import increment_version

from sglang_inflight.errors import Refused

# of device memory, kept from the first update on
SPARE_BYTES = 64 << 20


class Swap(Protocol):
    """Both tensors are of one shape and dtype."""

    def check(self, name: str, live: torch.Tensor, shadow: torch.Tensor) -> None:
        """Raises ``Refused`` where ``swap`` could not."""

    def swap(self, live: torch.Tensor, shadow: torch.Tensor) -> None:
        """Each gets what the other one has. Raises nothing, for what was checked."""


def swap_for(device: torch.device) -> Swap:
    contents = ContentSwap(device, SPARE_BYTES)
    return PointerSwap(contents) if device.type == "cpu" else contents


class PointerSwap:
    def __init__(self, contents: ContentSwap) -> None:
        self._contents = contents

    def check(self, name: str, live: torch.Tensor, shadow: torch.Tensor) -> None:
        # a view of it may be made at any time
        self._contents.check(name, live, shadow)

    def swap(self, live: torch.Tensor, shadow: torch.Tensor) -> None:
        # between two steps, when no kernel has views of its own
        if _count_users(live) > _ALONE:
            self._contents.swap(live, shadow)
        else:
            live.data, shadow.data = shadow.data, live.data


class ContentSwap:
    def __init__(self, device: torch.device, spare_bytes: int) -> None:
        self._spare = torch.empty(spare_bytes, dtype=torch.uint8, device=device)

    def check(self, name: str, live: torch.Tensor, shadow: torch.Tensor) -> None:
        if live.device.type == "cpu" and self._spare.device.type != "cpu":
            # copies between two places of the host are not ordered by the device's stream
            raise Refused(f"{name!r} cannot be staged: it is kept on the host")
        # a shadow has the strides of a weight without holes, and only of such a one
        if live.stride() != shadow.stride():
            raise Refused(
                f"{name!r} cannot be staged: its memory has holes (shape {tuple(live.shape)}, "
                f"strides {live.stride()})"
            )

    def swap(self, live: torch.Tensor, shadow: torch.Tensor) -> None:
        size = len(self._spare)
        for a, b in zip(_pieces(live, size), _pieces(shadow, size), strict=True):
            # the stream keeps the order, also between this piece and the one before
            spare = self._spare[: len(a)]
            spare.copy_(a, non_blocking=True)
            a.copy_(b, non_blocking=True)
            b.copy_(spare, non_blocking=True)
        if not live.is_inference():
            # it was written through views that do not count: what was made of it is out of date
            increment_version(live)


@dataclass(frozen=True)
class PreparedSwap:
    """The pairs of live weight and shadow that a commit swaps; none in the mode ``off``.

    The staging thread makes it, and the scheduler's thread makes the swap. The message that
    carries the commit orders the two.
    """

    how: Swap | None = None
    pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    @property
    def is_possible(self) -> bool:
        return self.how is not None

    def make(self) -> int:
        """Returns the bytes swapped."""
        if self.how is None:
            return 0
        swapped = 0
        for live, shadow in self.pairs:
            self.how.swap(live, shadow)
            swapped += live.nbytes
        return swapped


def _pieces(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """The bytes of a tensor without holes, ``size`` at a time, in the order of its memory."""
    memory = tensor.data.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    for start in range(0, len(memory), size):
        yield memory[start : start + size]


def _count_users(tensor: torch.Tensor) -> int:
    """Of its memory: tensors, and who asks."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_ALONE = _count_users(torch.empty(1))
