"""The plan of one model: which of its weights are written by moves alone, and by which.

    recorded    the loader's run on tensors without memory says so (``record.py``)
    proven      the checkpoint that is served, moved, is what is served; or the model's loader makes
                the same of other content (``trial.py``)
    dropped     a weight for which that is wrong goes by the loader, with all tensors that write it

Elements that no move reaches are constants, such as padding, or were set by the model itself: they
stay as they are. So coverage is a set of names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from itertools import islice
from types import MappingProxyType

import torch

from sglang_inflight.scheduler.plans.moves import Box, Move
from sglang_inflight.scheduler.plans.record import Kind
from sglang_inflight.scheduler.plans.recorder import Planned, Recorded
from sglang_inflight.scheduler.update.changes.encoding import as_integers
from sglang_inflight.scheduler.update.checks.tensors import FLOATS
from sglang_inflight.scheduler.update.finished.places import Number
from sglang_inflight.scheduler.update.rate import RateLimit, paced, yield_gil
from sglang_inflight.storages import span_of
from sglang_inflight.vocabulary.answers import Ways

# reasons in a status
_MOST_REASONS = 8


class Plan:
    """Made and asked by one thread at a time."""

    def __init__(
        self,
        kinds: Mapping[str, Kind],
        moves: Mapping[str, tuple[Planned, ...]],
        by_loader: Mapping[str, str],
        together: Mapping[str, str | None],
        numbers: Mapping[str, Number] = MappingProxyType({}),
    ) -> None:
        # shapes and dtypes of the checkpoint's tensors
        self.kinds = dict(kinds)
        # moves by the name of a planned tensor
        self.moves = dict(moves)
        # why a tensor goes by the model's loader
        self.by_loader = dict(by_loader)
        # see ``Recorded``
        self.together = dict(together)
        self.numbers = dict(numbers)
        # the tensors that write a planned weight
        self.writers: dict[str, set[str]] = {}
        self.indexed()

    @classmethod
    def of(
        cls, recorded: Recorded, kinds: Mapping[str, Kind], weights: Mapping[str, torch.Tensor]
    ) -> Plan:
        """``weights``: those served, by name."""
        of = recorded
        plan = cls(kinds, of.moves, of.unplanned, of.together, of.numbers)
        plan.fit(weights)
        return plan

    def fit(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Leave a weight to the loader whose moves would reach beyond it, or beyond a tensor."""
        for place in [*self.writers]:
            if place not in self.writers:
                continue
            if (why := self._why_elsewhere(place, weights.get(place))) is not None:
                self.drop(place, why)

    def indexed(self) -> Plan:
        """Return this plan, with ``writers`` by its moves."""
        self.writers = {}
        for name, planned in self.moves.items():
            for each in planned:
                self.writers.setdefault(each.place, set()).add(name)
        return self

    @property
    def needed(self) -> frozenset[str]:
        """Names of the planned tensors without which planned weights are not whole."""
        return frozenset(name for name, planned in self.moves.items() if planned)

    def is_as_planned(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Return whether the moves of ``name`` are those of such a tensor."""
        planned = self.kinds[name]
        if shape != planned.shape:
            return False
        return dtype == planned.dtype or (dtype in FLOATS and planned.dtype in FLOATS)

    def units(self) -> list[tuple[str, ...]]:
        """Return the planned tensors in the sets that the loader can take without all others."""
        sets: dict[str, list[str]] = {}
        for name, moves in self.moves.items():
            if moves and (unit := self.together.get(name, name)) is not None:
                sets.setdefault(unit, []).append(name)
        others = {self.together.get(name) for name in self.by_loader}
        return [tuple(names) for unit, names in sets.items() if unit not in others]

    def unit_of(self, name: str) -> Set[str]:
        """Return the names of the tensors that the loader has held for each other with ``name``."""
        unit = self.together.get(name)
        return {name} if unit is None else self._held_together[unit]

    @functools.cached_property
    def _held_together(self) -> Mapping[str, Set[str]]:
        found: dict[str, set[str]] = {}
        for name, unit in paced(self.together.items()):
            if unit is not None:
                found.setdefault(unit, set()).add(name)
        return found

    def ways(self, *, finishes: bool) -> Ways:
        """Count the tensors by the way that they take. ``finishes``: SGLang finishes the model."""
        counts = {way: dict.fromkeys(("tensors", "bytes"), 0) for way in ("planned", "other")}
        why: dict[str, str] = {}
        for name, kind in self.kinds.items():
            if (reason := self.by_loader.get(name)) is not None:
                why.setdefault(reason, name)
            elif not self.moves.get(name):
                continue
            count = counts["planned" if reason is None else "other"]
            count["tensors"] += 1
            count["bytes"] += math.prod(kind.shape) * kind.dtype.itemsize
            yield_gil()
        none = dict.fromkeys(("tensors", "bytes"), 0)
        finished, by_loader = counts["other"], none
        if not finishes:
            finished, by_loader = by_loader, finished
        few = dict(islice(why.items(), _MOST_REASONS))
        return Ways(planned=counts["planned"], finished=finished, by_loader=by_loader, why=few)

    def drop(self, place: str, why: str) -> None:
        """Leave the weight ``place`` to the loader, and whatever shares a tensor with it."""
        waiting = [place]
        while waiting:
            for name in self.writers.pop(waiting.pop(), ()):
                if (planned := self.moves.pop(name, None)) is None:
                    continue
                self.by_loader[name] = why
                waiting += [each.place for each in planned]

    def without(self, places: Collection[str]) -> Plan:
        """Return this plan without moves into the weights ``places``, which another model owns."""
        if self.writers.keys().isdisjoint(places):
            return self
        moves = {
            n: tuple(m for m in found if m.place not in places) for n, found in self.moves.items()
        }
        return Plan(self.kinds, moves, self.by_loader, self.together, self.numbers)

    def is_whole(self, place: str, weight: torch.Tensor) -> bool:
        """Return whether the moves reach every element of ``weight``."""
        return sum(move.numel for _, move in self._moves_into(place)) == weight.numel()

    def prove(
        self,
        served: Iterable[tuple[str, torch.Tensor]],
        weights: Mapping[str, torch.Tensor],
        check: Callable[[], None],
        rate_limit: RateLimit,
    ) -> bool:
        """Drop each weight that differs from what the ``served`` checkpoint's moves give.

        Return whether none does.

        ``weights`` are only read. ``check`` raises to give up. A tensor of another kind than
        planned, and one that does not come, leaves its weights unproven: they are dropped.
        """
        missing, count = set(self.needed), len(self.writers)
        for name, tensor in served:
            check()
            if name not in self.moves or self.kinds[name] != (tuple(tensor.shape), tensor.dtype):
                continue
            missing.discard(name)
            flat = tensor.reshape(-1)
            for each in self.moves[name]:
                to = each.move.target.view(weights[each.place].data)
                of = each.move.source.view(cast(flat, each.through))
                if not are_equal(to, of, rate_limit):
                    self.drop(
                        each.place, "the served weight has another content than its moves give"
                    )
                    break
        for name in sorted(missing & self.moves.keys()):
            for each in self.moves.get(name, ()):
                self.drop(each.place, f"the served checkpoint does not bring {name!r} as planned")
        return len(self.writers) == count

    def _moves_into(self, place: str) -> Iterator[tuple[str, Move]]:
        for name in self.writers[place]:
            for planned in self.moves[name]:
                if planned.place == place:
                    yield name, planned.move

    def _why_elsewhere(self, place: str, weight: torch.Tensor | None) -> str | None:
        """Return why the moves into ``place`` do not fit ``weight``, or None if they do."""
        if weight is None:
            return "the weight is not served as it was loaded"
        span = span_of(weight)
        if span != weight.numel():
            return "the weight has holes in its memory"
        for name, move in self._moves_into(place):
            if _end(move.target) > span or _end(move.source) > math.prod(self.kinds[name].shape):
                return "the weight is laid out in another way"
        return None


def _end(box: Box) -> int:
    return box.offset + 1 + sum((n - 1) * s for n, s in zip(box.sizes, box.strides, strict=True))


def cast(tensor: torch.Tensor, through: tuple[torch.dtype, ...]) -> torch.Tensor:
    for dtype in through:
        tensor = tensor.to(dtype)
    return tensor


def are_equal(to: torch.Tensor, of: torch.Tensor, rate_limit: RateLimit) -> bool:
    """Return whether a copy of ``of`` would leave the bits of ``to``.

    NaN equals itself, and 0.0 differs from -0.0.
    """
    if to.dim() == 0:
        to, of = to.view(1), of.view(1)
    for one, other in rate_limit.cut(to, of):
        new = as_integers(other.to(one.device, one.dtype))
        if not torch.equal(as_integers(one), new):
            return False
    return True
