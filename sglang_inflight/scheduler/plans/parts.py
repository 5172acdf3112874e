"""The part of each tensor that a plan uses, and the plan of these parts.

A rank keeps a part of most tensors: its share of a tensor parallel layer, its experts, its stage.
A sender that knows the parts sends nothing else, and the rank moves them by a plan in which the
checkpoint's tensors are these parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sglang_inflight.scheduler.plans.moves import Box, Move, move
from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.plans.record import Kind
from sglang_inflight.scheduler.plans.recorder import Planned
from sglang_inflight.scheduler.update.rate import paced
from sglang_inflight.vocabulary.regions import Region


class Parts(NamedTuple):
    """``wanted``: the region of each tensor that the rank uses. Others are not used at all."""

    wanted: Mapping[str, Region]
    plan: Plan


def parts_of(plan: Plan, by_loader: Iterable[str]) -> Parts:
    """Return what the rank of ``plan`` uses. ``by_loader``: the tensors that its loader uses whole.

    Takes some 20 µs a tensor.
    """
    wanted = {name: Region.whole(plan.kinds[name].shape) for name in by_loader}
    moves: dict[str, tuple[Planned, ...]] = {}
    kinds = dict(plan.kinds)
    shared: dict[Kind, Kind] = {}
    for name, planned in paced(plan.moves.items()):
        moves[name] = planned
        if not planned:
            continue
        shape, dtype = plan.kinds[name]
        found = [_Steps.of(shape, each.move) for each in planned]
        if name in wanted or any(steps is None for steps in found):
            wanted[name] = Region.whole(shape)
            continue
        steps = [each for each in found if each is not None]
        region = steps[0].region
        for each in steps[1:]:
            region = region.around(each.region)
        wanted[name] = region
        kind = Kind(region.sizes, dtype)
        kinds[name] = shared.setdefault(kind, kind)
        moves[name] = tuple(
            Planned(old.place, each.within(region, old.move), old.through)
            for old, each in zip(planned, steps, strict=True)
        )
    of_parts = Plan(kinds, moves, plan.by_loader, plan.together, plan.numbers)
    return Parts(wanted, of_parts)


class _Step(NamedTuple):
    """One dimension of a move: ``times`` elements, ``size`` apart along ``dim`` of the tensor."""

    dim: int
    size: int
    times: int


class _Steps(NamedTuple):
    """The source of a move, along the dimensions of its tensor."""

    region: Region
    # steps of each dimension of the move, the innermost first
    steps: list[list[_Step]]

    @classmethod
    def of(cls, shape: Sequence[int], move: Move) -> _Steps | None:
        """Return the steps of ``move`` in a tensor of ``shape``; None: it follows no dimension."""
        starts = _position(move.of, shape)
        last = list(starts)
        found: list[list[_Step]] = []
        for count, stride in zip(move.sizes, move.of_strides, strict=True):
            steps = _along(shape, starts, count, stride)
            if steps is None:
                return None
            for step in steps:
                last[step.dim] += step.size * (step.times - 1)
            found.append(steps)
        if any(at >= size for at, size in zip(last, shape, strict=True)):
            return None
        sizes = tuple(end - start + 1 for start, end in zip(starts, last, strict=True))
        return cls(Region(tuple(starts), sizes), found)

    def within(self, region: Region, old: Move) -> Move:
        """Return the move ``old`` from a tensor that holds ``region`` alone."""
        strides = _strides(region.sizes)
        inner = self.region.seen_from(region)
        of = sum(start * stride for start, stride in zip(inner.starts, strides, strict=True))
        sizes: list[int] = []
        of_strides: list[int] = []
        to_strides: list[int] = []
        for steps, to_stride in zip(self.steps, old.to_strides, strict=True):
            for step in steps:
                sizes.append(step.times)
                of_strides.append(step.size * strides[step.dim])
                to_strides.append(to_stride)
                to_stride *= step.times
        return move(
            Box(of, tuple(sizes), tuple(of_strides)),
            Box(old.to, tuple(sizes), tuple(to_strides)),
        )


def _along(
    shape: Sequence[int], starts: Sequence[int], count: int, stride: int
) -> list[_Step] | None:
    """Return the steps of ``count`` elements, ``stride`` apart, the innermost first."""
    if stride == 0:
        return None if count > 1 else []
    strides = _strides(shape)
    found: list[_Step] = []
    while count > 1:
        dim = next((d for d, s in enumerate(strides) if shape[d] > 1 and s <= stride), None)
        if dim is None or stride % strides[dim]:
            return None
        size = stride // strides[dim]
        if starts[dim] + size * (count - 1) < shape[dim]:
            found.append(_Step(dim, size, count))
            break
        # all along this dimension, and on along the next one
        inner = shape[dim] // size
        if shape[dim] % size or starts[dim] >= size or count % inner:
            return None
        found.append(_Step(dim, size, inner))
        count //= inner
        stride *= inner
    return found


def _position(offset: int, shape: Sequence[int]) -> list[int]:
    """Return the position of the element ``offset`` in each dimension."""
    found: list[int] = []
    for stride in _strides(shape):
        found.append(offset // stride)
        offset %= stride
    return found


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
