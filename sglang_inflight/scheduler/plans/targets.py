"""Boxes side by side in a row: of the row of a stretch, and of the weights where it goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import accumulate, count

import torch

from sglang_inflight.scheduler.plans.lattice import Lattice, Range, find_lattices
from sglang_inflight.scheduler.plans.moves import Box
from sglang_inflight.scheduler.update.weight import Weight

_Steps = tuple[int, ...]


class _Cuts:
    """Boxes of one memory, cut out by few calls of torch.

    A step and the staging thread hand each other the interpreter at each call of torch. So a call
    for each box would cost a step more than the copies.
    """

    def __init__(self, boxes: Iterable[tuple[int, int, _Steps, _Steps]]) -> None:
        """``boxes``: the number, offset, shape and strides of each."""
        self._first = end = -1
        # neighbours from the first range to the end of the last one, and which of them are boxes
        self._sizes: list[int] = []
        self._picked: list[tuple[int, int]] = []
        self._others: list[tuple[int, int, _Steps, _Steps]] = []
        for box in sorted(boxes, key=lambda box: box[1]):
            number, offset, shape, strides = box
            if strides != (1,) or offset < end:
                self._others.append(box)
                continue
            if self._first < 0:
                self._first = end = offset
            if offset > end:
                self._sizes.append(offset - end)
            self._picked.append((len(self._sizes), number))
            self._sizes.append(shape[0])
            end = offset + shape[0]
        self._span = end - self._first

    def cut(self, memory: torch.Tensor, views: list[torch.Tensor]) -> None:
        """Put each box's view of ``memory`` into ``views``, at its number."""
        start = int(memory.storage_offset())
        if self._sizes:
            row = memory.as_strided((self._span,), (1,), start + self._first)
            pieces = torch.split_with_sizes(row, self._sizes)
            for at, number in self._picked:
                views[number] = pieces[at]
        for number, offset, shape, strides in self._others:
            views[number] = memory.as_strided(shape, strides, start + offset)


class Boxes:
    """Boxes in columns, without an object for each: Python's collector would visit it.

    A box that is one range is a row.
    """

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.shapes: list[_Steps] = []
        self.strides: list[_Steps] = []
        self.numel = 0
        # equal geometry shares memory
        self._shared: dict[_Steps, _Steps] = {}
        # once the boxes are complete
        self._cuts: _Cuts | None = None

    def __len__(self) -> int:
        return len(self.offsets)

    def add(self, box: Box, *, joins: bool) -> bool:
        """Add a box. ``joins``: it may be one with the last, if both are one range.

        Return whether it is.
        """
        numel = box.numel
        self.numel += numel
        shape, strides = ((numel,), (1,)) if box.is_range else (box.sizes, box.strides)
        if joins and self.offsets and strides == self.strides[-1] == (1,):
            (size,) = self.shapes[-1]
            if self.offsets[-1] + size == box.offset:
                self.shapes[-1] = self._share((size + numel,))
                return True
        self.offsets.append(box.offset)
        self.shapes.append(self._share(shape))
        self.strides.append(self._share(strides))
        return False

    def _share(self, steps: _Steps) -> _Steps:
        return self._shared.setdefault(steps, steps)

    def sizes(self) -> Iterator[int]:
        return map(math.prod, self.shapes)

    def is_range(self, n: int) -> bool:
        return self.strides[n] == (1,)

    @property
    def are_ranges(self) -> bool:
        return all(strides == (1,) for strides in self.strides)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return each box in ``memory``. No box may follow."""
        if self._cuts is None:
            self._cuts = _Cuts(self.columns())
        views = [memory] * len(self)
        self._cuts.cut(memory, views)
        return views

    def rows(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the elements of each box in ``memory``, a row each. No box may follow."""
        views = self.views(memory)
        return views if self.are_ranges else [view.reshape(-1) for view in views]

    def columns(self) -> Iterator[tuple[int, int, _Steps, _Steps]]:
        """Yield the number, offset, shape and strides of each box."""
        return zip(count(), self.offsets, self.shapes, self.strides, strict=False)


class Targets:
    """Boxes of weights whose elements lie side by side in a row, in this order.

    The weights have one dtype and device, and no element is in two boxes. Holds geometry alone:
    views of weights would keep memory that a commit has exchanged.
    """

    def __init__(self, boxes: Iterable[tuple[Weight, Box]] = ()) -> None:
        # each weight once, and the number of each box's weight
        self.weights: list[Weight] = []
        self.at: list[int] = []
        self.boxes = Boxes()
        self._number: dict[int, int] = {}
        self._runs: list[list[int]] | None = None
        # cuts of each weight, once the boxes are complete
        self._cuts: list[_Cuts] = []
        # how the boxes are copied, once they are complete
        self._copied: tuple[list[tuple[int, Lattice]], _Others | None] | None = None
        # numbers of boxes on a device, by what they are
        self._columns: dict[tuple[str, torch.device], torch.Tensor] = {}
        for weight, box in boxes:
            self.add(weight, box)

    def add(self, weight: Weight, box: Box) -> None:
        """Add a box at the end. Neighbours become one."""
        number = self._number_of(weight)
        if not self.boxes.add(box, joins=bool(self.at) and self.at[-1] == number):
            self.at.append(number)

    def _add_apart(self, weight: Weight, box: Box) -> None:
        self.at.append(self._number_of(weight))
        self.boxes.add(box, joins=False)

    def _number_of(self, weight: Weight) -> int:
        number = self._number.setdefault(id(weight.live), len(self.weights))
        if number == len(self.weights):
            self.weights.append(weight)
        return number

    @property
    def first(self) -> torch.Tensor:
        """A tensor of the weights' dtype and device."""
        return self.weights[0].live

    def views(self, memories: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each box in ``memories``, one for each weight, in the weight's layout.

        No box may follow.
        """
        if not self._cuts:
            of: list[list[tuple[int, int, _Steps, _Steps]]] = [[] for _ in self.weights]
            for box in self.boxes.columns():
                of[self.at[box[0]]].append(box)
            self._cuts = [_Cuts(boxes) for boxes in of]
        views = [memories[0]] * len(self.boxes)
        for cuts, memory in zip(self._cuts, memories, strict=True):
            cuts.cut(memory, views)
        return views

    def rows(self) -> list[torch.Tensor]:
        """Return the served elements of each box, as a row."""
        views = self.views([weight.live.data for weight in self.weights])
        return views if self.boxes.are_ranges else [view.reshape(-1) for view in views]

    def copy(self, memories: Sequence[torch.Tensor], row: torch.Tensor) -> None:
        """Copy ``row`` to each box in ``memories``, one for each weight, in the weight's layout.

        No box may follow.
        """
        # at once: for a row of another device or dtype torch would make a copy for each box
        row = row.to(memories[0].device, memories[0].dtype)
        lattices, others = self._ways()
        for n, (number, lattice) in enumerate(lattices):
            memory = memories[number]
            at = self.column(f"lattice {n}", memory.device, lattice.places)
            lattice.copy(memory, row, at)
        if others is not None:
            of, to, numbers = others
            to._copy_one_by_one([memories[number] for number in numbers], of.views(row))

    def _copy_one_by_one(
        self, memories: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]
    ) -> None:
        if not self.boxes.are_ranges:
            shaped = zip(pieces, self.boxes.shapes, strict=True)
            pieces = [piece.view(shape) for piece, shape in shaped]
        torch._foreach_copy_(self.views(memories), [*pieces])

    def _ways(self) -> tuple[list[tuple[int, Lattice]], _Others | None]:
        """Return the lattices among the boxes, each with its weight's number, and the others."""
        if self._copied is None:
            of_weight: list[list[Range]] = [[] for _ in self.weights]
            for n, start in zip(range(len(self.at)), self.bounds(), strict=False):
                if self.boxes.is_range(n):
                    (size,) = self.boxes.shapes[n]
                    of_weight[self.at[n]].append(Range(n, start, self.boxes.offsets[n], size))
            lattices: list[tuple[int, Lattice]] = []
            taken: set[int] = set()
            for number, ranges in enumerate(of_weight):
                for lattice, numbers in find_lattices(ranges):
                    lattices.append((number, lattice))
                    taken.update(numbers)
            self._copied = lattices, self._others(taken)
        return self._copied

    def _others(self, taken: Container[int]) -> _Others | None:
        of, to = Boxes(), Targets()
        for n, start in zip(range(len(self.at)), self.bounds(), strict=False):
            if n not in taken:
                box = Box(self.boxes.offsets[n], self.boxes.shapes[n], self.boxes.strides[n])
                of.add(Box(start, (box.numel,), (1,)), joins=False)
                to._add_apart(self.weights[self.at[n]], box)
        numbers = [self._number[id(weight.live)] for weight in to.weights]
        return (of, to, numbers) if numbers else None

    def bounds(self) -> list[int]:
        """Return where each box begins in the row, and where the last one ends."""
        return [0, *accumulate(self.boxes.sizes())]

    def column(
        self, what: str, device: torch.device, make: Callable[[], Sequence[int]]
    ) -> torch.Tensor:
        """Return a number of each box, int64, made once. ``what``: its name."""
        if (found := self._columns.get((what, device))) is None:
            found = torch.tensor(make(), dtype=torch.int64, device=device)
            self._columns[what, device] = found
        return found

    @property
    def runs(self) -> list[list[int]]:
        """The ranges among the boxes, by their numbers: neighbours in a weight are in one list."""
        if self._runs is None:
            self._runs = []
            last = (-1, 0)
            ranges = (
                (at, self.boxes.offsets[n], n)
                for n, at in enumerate(self.at)
                if self.boxes.is_range(n)
            )
            for weight, start, n in sorted(ranges):
                if last != (weight, start):
                    self._runs.append([])
                self._runs[-1].append(n)
                last = weight, start + self.boxes.shapes[n][0]
        return self._runs


# boxes of a row, where they go, and the numbers of these weights in another ``Targets``
_Others = tuple[Boxes, Targets, list[int]]


def joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``rows`` as one row without gaps; a single one may be returned as it is."""
    # a view of a column is a row with gaps
    return rows[0].contiguous() if len(rows) == 1 else torch.cat([*rows])
