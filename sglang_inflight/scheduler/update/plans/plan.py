"""The plan of one model: which of its weights are written by moves alone, and by which.

    recorded    the loader's run on tensors without memory says so (``record.py``)
    proven      the checkpoint that is served, moved, is what is served
    dropped     a weight for which that is wrong goes by the loader, with all tensors that write it

Elements that no move reaches are constants, such as padding, or were set by the model itself: they
stay as they are. So coverage is a set of names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from sglang_inflight.scheduler.update.plans.moves import Box, Move
from sglang_inflight.scheduler.update.plans.record import Kind
from sglang_inflight.scheduler.update.plans.recorder import Recorded
from sglang_inflight.storages import span_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Copy(NamedTuple):
    """A move of a received tensor that is there, into a weight that is there.

    ``of`` and ``to`` have one shape. ``of`` has the dtype that the loader's last cast gives.
    """

    place: str
    to: torch.Tensor
    of: torch.Tensor


class Plan:
    """Made and asked by one thread at a time."""

    def __init__(
        self, recorded: Recorded, kinds: Mapping[str, Kind], weights: Mapping[str, torch.Tensor]
    ) -> None:
        """``kinds``: of the checkpoint's tensors. ``weights``: those served, by name."""
        self.kinds = kinds
        # by the name of a planned tensor
        self.moves = dict(recorded.moves)
        # why a tensor goes by the model's loader
        self.by_loader = dict(recorded.unplanned)
        # the tensors that write a planned weight
        self.writers: dict[str, set[str]] = {}
        for name, planned in self.moves.items():
            for place, _, _ in planned:
                self.writers.setdefault(place, set()).add(name)
        for place in [*self.writers]:
            if (why := _why_elsewhere(weights.get(place), self._moves_into(place))) is not None:
                self.drop(place, why)

    @property
    def needed(self) -> frozenset[str]:
        """Names of the planned tensors without which planned weights are not whole."""
        return frozenset(name for name, planned in self.moves.items() if planned)

    def drop(self, place: str, why: str) -> None:
        """Leave the weight ``place`` to the loader, and whatever shares a tensor with it."""
        waiting = [place]
        while waiting:
            for name in self.writers.pop(waiting.pop(), ()):
                if (planned := self.moves.pop(name, None)) is None:
                    continue
                self.by_loader[name] = why
                waiting += [each.place for each in planned]

    def copies(
        self, name: str, tensor: torch.Tensor, weights: Mapping[str, torch.Tensor]
    ) -> list[Copy]:
        """Return the copies by which the planned ``tensor`` comes into ``weights``."""
        flat = tensor.reshape(-1)
        made: dict[tuple[torch.dtype, ...], torch.Tensor] = {(): flat}
        copies = []
        for place, move, through in self.moves[name]:
            if through not in made:
                made[through] = _cast(flat, through)
            to = move.target.view(weights[place].data)
            copies.append(Copy(place, to, move.source.view(made[through])))
        return copies

    def prove(
        self,
        served: Iterable[tuple[str, torch.Tensor]],
        weights: Mapping[str, torch.Tensor],
        check: Callable[[], None],
    ) -> None:
        """Drop each weight that differs from what the ``served`` checkpoint's moves give.

        ``weights`` are only read. ``check`` raises to give up. A tensor of another kind than
        planned, and one that does not come, leaves its weights unproven: they are dropped.
        """
        missing = set(self.needed)
        for name, tensor in served:
            check()
            if name not in self.moves or self.kinds[name] != (tuple(tensor.shape), tensor.dtype):
                continue
            missing.discard(name)
            for place, to, of in self.copies(name, tensor, weights):
                if not _are_equal(to, of.to(to.device, to.dtype)):
                    self.drop(place, "the served weight has another content than its moves give")
                    break
        for name in sorted(missing & self.moves.keys()):
            for place, _, _ in self.moves.get(name, ()):
                self.drop(place, f"the served checkpoint does not bring {name!r} as planned")

    def _moves_into(self, place: str) -> Iterable[Move]:
        return (
            planned.move
            for name in self.writers[place]
            for planned in self.moves[name]
            if planned.place == place
        )


def _why_elsewhere(weight: torch.Tensor | None, moves: Iterable[Move]) -> str | None:
    """Return why moves do not fit a weight, or None if they do."""
    if weight is None:
        return "the weight is no parameter of the served model"
    span = span_of(weight)
    if span != weight.numel():
        return "the weight has holes in its memory"
    if any(_end(move.target) > span for move in moves):
        return "the weight is laid out in another way"
    return None


def _end(box: Box) -> int:
    return box.offset + 1 + sum((n - 1) * s for n, s in zip(box.sizes, box.strides, strict=True))


def _cast(tensor: torch.Tensor, through: tuple[torch.dtype, ...]) -> torch.Tensor:
    for dtype in through:
        tensor = tensor.to(dtype)
    return tensor


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both hold the same bits: NaN equals itself, and 0.0 differs from -0.0."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    bits = _BITS[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))
