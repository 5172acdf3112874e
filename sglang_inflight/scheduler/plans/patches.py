"""Parts of many tensors as patches of the weights where their load plan moves them.

An index in a tensor becomes a position in a weight by arithmetic, for all tensors of a batch at
once. So a tensor with a few elements costs the interpreter some microseconds, and the rest of the
work is one patch for each weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from sglang_inflight.scheduler.plans.moves import Move, without_repeats
from sglang_inflight.scheduler.plans.plan import cast
from sglang_inflight.scheduler.plans.recorder import Planned
from sglang_inflight.scheduler.update.sources.sparse import Sparse
from sglang_inflight.scheduler.update.weight import Patch, Weight

# bits of a position in a weight; the rest of a key is the number of the weight
_BITS = 40


class _Group:
    """Moves of tensors of one kind into weights of one kind."""

    def __init__(self, through: tuple[torch.dtype, ...]) -> None:
        self._through = through
        self._parts: list[Sparse] = []
        self._moves: list[Move] = []
        self._weights: list[Weight] = []
        self._at: list[int] = []
        self._number: dict[int, int] = {}

    def add(self, part: Sparse, move: Move, weight: Weight) -> None:
        number = self._number.setdefault(id(weight.live), len(self._weights))
        if number == len(self._weights):
            self._weights.append(weight)
        self._at.append(number)
        self._parts.append(part)
        self._moves.append(move)

    def patches(self) -> Iterator[Patch]:
        values = torch.cat([part.values for part in self._parts])
        device = values.device
        indices = torch.cat([part.indices.to(torch.int64) for part in self._parts]).to(device)
        lengths = torch.tensor([len(part.values) for part in self._parts], device=device)
        number = torch.repeat_interleave(lengths, output_size=len(indices))
        inside, to = _locate(self._moves, number, indices)
        key = torch.tensor(self._at, device=device)[number] << _BITS
        key, order = (key + to)[inside].sort()
        values = cast(values, self._through)[inside][order]
        counts = torch.bincount(key >> _BITS, minlength=len(self._weights)).tolist()
        rows = zip(self._weights, key.split(counts), values.split(counts), strict=True)
        for weight, at, own in rows:
            if len(at):
                yield Patch(weight, at & ((1 << _BITS) - 1), own)


def patches_of(
    batch: Sequence[Sparse],
    moves: Mapping[str, Sequence[Planned]],
    weights: Mapping[str, Weight],
) -> Iterator[Patch]:
    """Yield what ``batch``, of different tensors, brings to each weight.

    Each move has a place for each of its elements (``can_locate``).
    """
    groups: dict[tuple[object, ...], _Group] = {}
    for part in batch:
        for planned in moves[part.name] if len(part.values) else ():
            weight = weights[planned.place]
            live, values = weight.live, part.values
            kind = values.dtype, values.device, planned.through, live.dtype, live.device
            group = groups.setdefault(kind, _Group(planned.through))
            for move in without_repeats(planned.move):
                group.add(part, move, weight)
    for group in groups.values():
        yield from group.patches()


def _locate(
    moves: Sequence[Move], number: torch.Tensor, at: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as ``locate``, for positions ``at`` in tensors with different ``moves``.

    ``number``: which move each position is about.
    """

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=at.device)[number]

    rest = at - column([move.of for move in moves])
    inside = rest >= 0
    to = column([move.to for move in moves])
    # the widest steps first; a move of fewer dimensions has no other steps than the first
    dims = [
        sorted(zip(move.of_strides, move.sizes, move.to_strides, strict=True), reverse=True)
        for move in moves
    ]
    for dim in range(max(map(len, dims))):
        steps = [each[dim] if dim < len(each) else (1, 1, 0) for each in dims]
        of_stride, size, to_stride = (column(values) for values in zip(*steps, strict=True))
        step = rest // of_stride
        inside &= step < size
        rest -= step * of_stride
        to += step * to_stride
    return inside.logical_and_(rest == 0), to
