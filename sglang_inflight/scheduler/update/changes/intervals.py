"""Ranges of a weight's memory that an update has written."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import torch

from sglang_inflight.storages import span_of


class Intervals:
    """A set of positions, as disjoint half-open ranges in ascending order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        # ranges that touch the new one become part of it
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def discard(self, start: int, end: int) -> None:
        if start >= end:
            return
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        if first >= last:
            return
        before, after = self._starts[first], self._ends[last - 1]
        self._starts[first:last] = [before] * (before < start) + [end] * (end < after)
        self._ends[first:last] = [start] * (before < start) + [after] * (end < after)

    def add_where(self, start: int, written: torch.Tensor) -> None:
        """Add each position of ``written`` (booleans, from position ``start`` on) that is True."""
        if bool(written.all()):
            self.add(start, start + len(written))
            return
        edges = torch.diff(
            written.to(torch.int8),
            prepend=written.new_zeros(1, dtype=torch.int8),
            append=written.new_zeros(1, dtype=torch.int8),
        )
        begins = (edges == 1).nonzero().view(-1).tolist()
        ends = (edges == -1).nonzero().view(-1).tolist()
        for begin, end in zip(begins, ends, strict=True):
            self.add(start + begin, start + end)

    def add_view(self, view: torch.Tensor, width: int) -> None:
        """Add the elements of ``view``, counted in elements of ``width`` bytes of its memory.

        A view of other elements counts if it is one range.
        """
        if view.itemsize != width or view.is_contiguous():
            if view.is_contiguous():
                start = int(view.storage_offset()) * view.itemsize
                self.add(start // width, (start + view.nbytes) // width)
            return
        self.add_where(int(view.storage_offset()), _mask_of(view))

    def has_view(self, view: torch.Tensor, width: int) -> bool:
        """Return whether all elements of ``view`` are in the set, counted as in ``add_view``."""
        first = int(view.storage_offset()) * view.itemsize // width
        end = -(-(int(view.storage_offset()) + span_of(view)) * view.itemsize // width)
        at = bisect_right(self._starts, first) - 1
        if first >= end or (at >= 0 and end <= self._ends[at]):
            return True
        if view.itemsize != width or view.is_contiguous():
            return False
        missing = _mask_of(view)
        for start, stop in zip(self._starts, self._ends, strict=True):
            missing[max(0, start - first) : max(0, stop - first)] = False
        return not bool(missing.any())

    def overlaps(self, start: int, end: int) -> bool:
        at = bisect_right(self._ends, start)
        return start < end and at < len(self._starts) and self._starts[at] < end

    def gaps(self, length: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of positions below ``length`` that are not in the set."""
        for start, end in zip([0, *self._ends], [*self._starts, length], strict=True):
            if start < end:
                yield start, end

    def __len__(self) -> int:
        """Return the number of positions."""
        return sum(self._ends) - sum(self._starts)


def _mask_of(view: torch.Tensor) -> torch.Tensor:
    """Return which elements of its span ``view`` has, as a row of booleans."""
    mask = torch.zeros(span_of(view), dtype=torch.bool)
    mask.as_strided(view.shape, view.stride()).fill_(True)
    return mask
