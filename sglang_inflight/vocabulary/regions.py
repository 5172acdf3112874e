"""Regions of tensors: the part that one rank has or wants, as a start and a size in each dimension.

Trainer and server compute with them, so they know neither torch nor SGLang.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Region(NamedTuple):
    """Elements of a tensor: ``sizes`` of them in each dimension, from ``starts`` on."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """The positions behind the last element."""
        return tuple(start + size for start, size in zip(self.starts, self.sizes, strict=True))

    def is_within(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of ``shape`` has the region."""
        return len(shape) == len(self.starts) and all(
            0 <= start <= end <= size
            for start, end, size in zip(self.starts, self.ends, shape, strict=True)
        )

    def overlap(self, other: Region) -> Region | None:
        """Return the elements in both regions, of one tensor, or None."""
        starts = tuple(map(max, self.starts, other.starts))
        ends = tuple(map(min, self.ends, other.ends))
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Region(starts, sizes) if all(size > 0 for size in sizes) else None

    def around(self, other: Region) -> Region:
        """Return the smallest region with both."""
        starts = tuple(map(min, self.starts, other.starts))
        ends = tuple(map(max, self.ends, other.ends))
        return Region(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def seen_from(self, outer: Region) -> Region:
        """Return this region's place in a tensor that holds ``outer`` alone."""
        starts = tuple(start - at for start, at in zip(self.starts, outer.starts, strict=True))
        return Region(starts, self.sizes)

    def without(self, taken: Region) -> list[Region]:
        """Return regions that are together this one less ``taken``."""
        both = self.overlap(taken)
        if both is None:
            return [self]
        found: list[Region] = []
        starts, ends = list(self.starts), list(self.ends)
        for dim, (start, end) in enumerate(zip(both.starts, both.ends, strict=True)):
            for low, high in ((starts[dim], start), (end, ends[dim])):
                if low < high:
                    found.append(_of_ends(starts, ends, dim, low, high))
            starts[dim], ends[dim] = start, end
        return found

    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.starts, self.ends))


def _of_ends(starts: list[int], ends: list[int], dim: int, low: int, high: int) -> Region:
    first = (*starts[:dim], low, *starts[dim + 1 :])
    last = (*ends[:dim], high, *ends[dim + 1 :])
    return Region(first, tuple(end - start for start, end in zip(first, last, strict=True)))
