"""Boxes of one size in even steps: one call of torch copies them, without the interpreter.

A layer's experts lie in a row one after the other, and in a weight in another order. So their
places in the row are an arithmetic sequence, and those in the weight are multiples of their size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

# a call costs as much as some views
_FEWEST = 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Range(NamedTuple):
    """A range of a row, and where it goes in a weight. All but ``number`` in elements."""

    number: int
    in_row: int
    in_weight: int
    size: int


class Lattice(NamedTuple):
    """Ranges of one size, in elements."""

    size: int
    # the first range in the row, and the distance of neighbours
    start: int
    step: int
    # the weight has ``rows`` of this size from there
    first: int
    rows: int
    # which of those rows each range is
    at: list[int]

    def places(self) -> list[int]:
        return self.at

    def copy(self, memory: torch.Tensor, row: torch.Tensor, at: torch.Tensor) -> None:
        """Copy the ranges from ``row`` to ``memory``, of one dtype. ``at``: int64."""
        of = _rows(row, self.start, len(self.at), self.step, self.size)
        to = _rows(memory, self.first, self.rows, self.size, self.size)
        # numbers without a meaning: of any dtype, and several elements in one
        words = _words(of, to)
        to.view(words).index_copy_(0, at, of.view(words))


def find_lattices(ranges: Iterable[Range]) -> Iterator[tuple[Lattice, list[int]]]:
    """Yield the lattices among ``ranges``, of one row and one weight, and their ranges' numbers."""
    of_size: dict[int, list[Range]] = defaultdict(list)
    for each in ranges:
        of_size[each.size].append(each)
    for size, equal in of_size.items():
        for even in _in_even_steps(sorted(equal, key=lambda each: each.in_row)):
            first = min(each.in_weight for each in even) % size
            if any((each.in_weight - first) % size for each in even):
                continue
            at = [(each.in_weight - first) // size for each in even]
            start, step = even[0].in_row, even[1].in_row - even[0].in_row
            lattice = Lattice(size, start, step, first, max(at) + 1, at)
            yield lattice, [each.number for each in even]


def _in_even_steps(ranges: list[Range]) -> Iterator[list[Range]]:
    """Cut ``ranges``, in the row's order, into sequences of even steps. Short ones are left out."""
    run: list[Range] = []
    for each in ranges:
        if len(run) > 1 and each.in_row - run[-1].in_row != run[1].in_row - run[0].in_row:
            if len(run) >= _FEWEST:
                yield run
            run = []
        run.append(each)
    if len(run) >= _FEWEST:
        yield run


def _rows(memory: torch.Tensor, first: int, count: int, step: int, size: int) -> torch.Tensor:
    start = int(memory.storage_offset()) + first
    return memory.as_strided((count, size), (step, 1), start)


def _words(*rows: torch.Tensor) -> torch.dtype:
    """Return the widest integers that ``rows`` are made of."""
    itemsize = rows[0].itemsize
    elements = [n for row in rows for n in (row.shape[1], row.stride(0), row.storage_offset())]
    addresses = [row.data_ptr() for row in rows]
    for width, dtype in sorted(_INTEGERS.items(), reverse=True):
        fits = all(n * itemsize % width == 0 for n in elements)
        if width >= itemsize and fits and all(address % width == 0 for address in addresses):
            return dtype
    # wider than any integer
    return rows[0].dtype
