"""Moves: where the elements of a checkpoint's tensor lie in a model's tensors.

A move copies a strided box of elements, with a cast where the dtypes differ. Both sides are in
elements from the beginning of a tensor's memory: of the arriving tensor, which is contiguous, and
of the model's tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

# bits of an element's position in an address; the rest names the tensor
_BITS = 40
# address of an element that no tensor of the checkpoint brings
CONSTANT = -1
# most moves of one copy: a copy in more parts is taken for a computation
_MOST = 4096


class Box(NamedTuple):
    """Elements of one memory: ``sizes``, with ``strides`` between them, from ``offset`` on."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Box:
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def end(self) -> int:
        """The position behind the last element."""
        return self.offset + _span(self)

    @property
    def is_range(self) -> bool:
        """Whether the elements are one range of the memory, in their order."""
        numel = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != numel:
                return False
            numel *= size
        return True

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return the int64 positions of the elements in the memory, a row."""
        found = torch.full((), self.offset, dtype=torch.int64, device=device)
        for at, (size, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            steps = torch.arange(size, dtype=torch.int64, device=device) * stride
            found = found + steps.view(-1, *[1] * (len(self.sizes) - at - 1))
        return found.reshape(-1)

    def view(self, flat: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return the elements, in ``flat`` from ``start`` on."""
        return flat.as_strided(
            self.sizes, self.strides, flat.storage_offset() + start + self.offset
        )


class Move(NamedTuple):
    """One copy. Equal copies are equal moves: dimensions are joined and in the order of ``to``."""

    sizes: tuple[int, ...]
    of: int
    of_strides: tuple[int, ...]
    to: int
    to_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def source(self) -> Box:
        return Box(self.of, self.sizes, self.of_strides)

    @property
    def target(self) -> Box:
        return Box(self.to, self.sizes, self.to_strides)


def without_repeats(move: Move) -> list[Move]:
    """Return moves that copy each element to one place, and together what ``move`` copies."""
    if 0 not in move.of_strides:
        return [move]
    found = [move._replace(sizes=(), of_strides=(), to_strides=())]
    dims = zip(move.sizes, move.of_strides, move.to_strides, strict=True)
    for size, of_stride, to_stride in dims:
        if of_stride:
            found = [
                each._replace(
                    sizes=(*each.sizes, size),
                    of_strides=(*each.of_strides, of_stride),
                    to_strides=(*each.to_strides, to_stride),
                )
                for each in found
            ]
        else:
            found = [e._replace(to=e.to + at * to_stride) for e in found for at in range(size)]
    return found


def can_locate(move: Move) -> bool:
    """Return whether ``locate`` finds the one place of each element that ``move`` copies."""
    dims = sorted(zip(move.of_strides, move.sizes, strict=True))
    least = 1
    for stride, size in dims:
        if stride < least:
            return False
        least = stride * size
    return True


def locate(move: Move, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which elements ``at`` (int64 positions in the tensor) ``move`` copies, and to where.

    The second result is right where the first one is True.
    """
    rest = at - move.of
    inside = rest >= 0
    to = torch.full_like(at, move.to)
    dims = zip(move.of_strides, move.sizes, move.to_strides, strict=True)
    for of_stride, size, to_stride in sorted(dims, reverse=True):
        step = rest // of_stride
        inside &= step < size
        rest -= step * of_stride
        to += step * to_stride
    return inside.logical_and_(rest == 0), to


def move(of: Box, to: Box) -> Move:
    """Return the move between two boxes of one shape."""
    assert of.sizes == to.sizes
    dims = [
        (to_stride, of_stride, size)
        for size, of_stride, to_stride in zip(to.sizes, of.strides, to.strides, strict=True)
        if size != 1
    ]
    dims.sort(key=lambda dim: (-dim[0], -dim[1]))
    joined: list[tuple[int, int, int]] = []
    for to_stride, of_stride, size in dims:
        if joined:
            outer_to, outer_of, outer = joined[-1]
            if outer_to == to_stride * size and outer_of == of_stride * size:
                joined[-1] = to_stride, of_stride, outer * size
                continue
        joined.append((to_stride, of_stride, size))
    return Move(
        tuple(size for *_, size in joined),
        of.offset,
        tuple(of_stride for _, of_stride, _ in joined),
        to.offset,
        tuple(to_stride for to_stride, *_ in joined),
    )


def addresses(number: int, box: Box) -> torch.Tensor:
    """Return the addresses (int64, of the box's shape) of elements of the tensor ``number``."""
    return (box.positions(torch.device("cpu")) + (number << _BITS)).view(box.sizes)


class TooMany(Exception):
    """A copy is in too many parts to be a move of data."""


def moves_of(found: torch.Tensor, to: Box) -> Iterator[tuple[int | None, Move]]:
    """Yield the moves by which ``found`` (addresses) comes to ``to``, with the tensors' numbers.

    Both have one shape. Constants have no number. Raises ``TooMany``.
    """
    waiting = [(found, to)]
    count = 0
    while waiting:
        block, box = waiting.pop()
        if not block.numel():
            continue
        first = int(block[(0,) * block.dim()])
        if (strides := _strides_of(block)) is not None:
            count += 1
            if count > _MOST:
                raise TooMany
            number = first >> _BITS if first >= 0 else None
            of = first & ((1 << _BITS) - 1) if number is not None else 0
            yield number, move(Box(of, box.sizes, strides), box)
            continue
        waiting.extend(_halves(block, box))
        if len(waiting) > _MOST:
            raise TooMany


def _strides_of(block: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides by which the addresses of ``block`` rise, None if they do otherwise."""
    first = block[(0,) * block.dim()]
    if first < 0:
        return (0,) * block.dim() if bool((block == first).all()) else None
    strides = []
    expected = first
    for dim, size in enumerate(block.shape):
        at = [0] * block.dim()
        at[dim] = min(1, size - 1)
        stride = int(block[tuple(at)] - first)
        strides.append(stride)
        steps = torch.arange(size, dtype=torch.int64) * stride
        expected = expected + steps.view(-1, *[1] * (block.dim() - dim - 1))
    if any(stride < 0 for stride in strides) or not torch.equal(block, expected):
        return None
    # a step into another tensor would look like a stride
    return tuple(strides) if int(block.max()) >> _BITS == int(first) >> _BITS else None


def _halves(block: torch.Tensor, box: Box) -> Iterator[tuple[torch.Tensor, Box]]:
    """Yield two parts of a block that is no box, cut where its steps change."""
    dim, cut = _find_cut(block)
    rest = block.shape[dim] - cut
    yield block.narrow(dim, cut, rest), _narrow(box, dim, cut, rest)
    yield block.narrow(dim, 0, cut), _narrow(box, dim, 0, cut)


def _find_cut(block: torch.Tensor) -> tuple[int, int]:
    dims = [dim for dim in range(block.dim()) if block.shape[dim] > 1]
    for dim in dims:
        steps = block.diff(dim=dim).movedim(dim, 0)
        same = (steps == steps[:1]).reshape(len(steps), -1).all(dim=1)
        if bool(same.all()):
            continue
        first = int((~same).nonzero()[0])
        # a lone first step leads to the next part
        is_lone = first == 1 and (
            not torch.equal(steps[0], steps[2]) if len(steps) > 2 else _leave(block, dim)
        )
        return dim, 1 if is_lone else first + 1
    # each element steps evenly, and its neighbour by another stride
    return dims[0], block.shape[dims[0]] // 2


def _leave(block: torch.Tensor, dim: int) -> bool:
    """Return whether the first step along ``dim`` leads to another tensor."""
    numbers = block.narrow(dim, 0, 2) >> _BITS
    return bool((numbers != numbers.narrow(dim, 0, 1)).any())


def _narrow(box: Box, dim: int, start: int, size: int) -> Box:
    sizes = (*box.sizes[:dim], size, *box.sizes[dim + 1 :])
    return Box(box.offset + start * box.strides[dim], sizes, box.strides)


def overlap(boxes: Sequence[Box]) -> bool:
    """Return whether two of ``boxes``, in one memory, have an element in common."""
    spans = sorted((box.offset, box.offset + _span(box), box) for box in boxes if box.numel)
    at = 0
    while at < len(spans):
        begin, end, _ = spans[at]
        cluster = [spans[at][2]]
        at += 1
        while at < len(spans) and spans[at][0] < end:
            end = max(end, spans[at][1])
            cluster.append(spans[at][2])
            at += 1
        if len(cluster) > 1 and _overlap_within(cluster, begin, end):
            return True
    return False


def _overlap_within(boxes: Sequence[Box], begin: int, end: int) -> bool:
    numel = sum(box.numel for box in boxes)
    if numel > end - begin:
        return True
    seen = torch.zeros(end - begin, dtype=torch.bool)
    for box in boxes:
        box.view(seen, -begin).fill_(True)
    return int(seen.sum()) != numel


def _span(box: Box) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(box.sizes, box.strides, strict=True))
