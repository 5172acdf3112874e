"""Tensors side by side in a row of bytes, in a layout that other updates may have, too.

A source offers a stretch to a load plan (``Take``) before it makes a tensor of it. The plan works
out once how such a stretch goes, and moves later ones without a look at each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sglang_inflight.scheduler.update.sources.batches import Packed

# most bytes and tensors of a stretch; a larger tensor is one by itself
MOST_BYTES = 4 << 20
MOST_TENSORS = 512


@dataclass(eq=False)
class Stretch:
    """Neighbours in a row of ``nbytes`` bytes. Read-only once it is complete.

    ``starts``: the first byte of each in the row. The same layout is the same object in every
    update, so findings are kept by it. Four lists, and no object for each tensor: Python's
    collector would visit them.
    """

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[Sequence[int]]
    starts: list[int]
    nbytes: int = 0

    @classmethod
    def begin(cls) -> Stretch:
        return cls([], [], [], [])

    def add(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], nbytes: int, *, gap: int = 0
    ) -> None:
        """Add a tensor of ``nbytes`` bytes at the end of the row, behind ``gap`` others."""
        self.names.append(name)
        self.dtypes.append(dtype)
        self.shapes.append(shape)
        self.starts.append(self.nbytes + gap)
        self.nbytes += gap + nbytes

    def has_room_for(self, nbytes: int) -> bool:
        return self.nbytes + nbytes <= MOST_BYTES and len(self.names) < MOST_TENSORS

    def tensors(self, row: torch.Tensor | None, those: Sequence[int]) -> Iterator[Named]:
        """Yield ``those`` tensors, by their numbers. ``row``: None for tensors without memory."""
        packed = None if row is None else Packed(row)
        for at in those:
            start, dtype, shape = self.starts[at], self.dtypes[at], self.shapes[at]
            if packed is None:
                tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
            else:
                end = start + math.prod(shape) * dtype.itemsize
                tensor = packed.view_or_copy(start, end, dtype, shape)
            yield self.names[at], tensor


Named = tuple[str, torch.Tensor]

# Moves the planned tensors of a stretch and of its row, a row of uint8. Returns the numbers of the
# others. The row is None for tensors that nobody needs.
Take = Callable[[Stretch, torch.Tensor | None], Sequence[int]]


def take_none(stretch: Stretch, row: torch.Tensor | None) -> Sequence[int]:
    return range(len(stretch.names))


def rest_of(stretch: Stretch, row: torch.Tensor | None, take: Take) -> Iterator[Named]:
    """Offer a stretch to ``take``, and yield what is left of it."""
    if left := take(stretch, row):
        yield from stretch.tensors(row, left)
