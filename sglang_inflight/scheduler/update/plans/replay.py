"""Moves the tensors of an update to where the plan of their model says.

    take       a tensor of the plan waits in a batch
    flush      the batch is checked, and moved at once by the form of the update
    leave      the model's loader is about to write a weight of the plan, for a tensor that is in no
               plan: the weight is the loader's for the rest of the update

So a planned tensor costs the interpreter some microseconds, and its model's loader is not asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from sglang_inflight.scheduler.update.checks.coverage import largest_magnitude
from sglang_inflight.scheduler.update.checks.tensors import FLOATS, HELD_BY_ALL, infinite_refusal
from sglang_inflight.scheduler.update.forms import Form
from sglang_inflight.scheduler.update.plans.audit import Audit
from sglang_inflight.scheduler.update.plans.moves import Box, can_locate, locate
from sglang_inflight.scheduler.update.plans.plan import Plan, cast
from sglang_inflight.scheduler.update.plans.recorder import Planned
from sglang_inflight.scheduler.update.rate import RateLimit, paced
from sglang_inflight.scheduler.update.sources.sparse import Sparse
from sglang_inflight.scheduler.update.weight import Moved, Patch, Weight
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import Refused, shorten

# elements and tensors that wait at most; a larger tensor waits for none
_MOST_ELEMENTS = 1 << 20
_MOST_TENSORS = 512


class Replay:
    """The plan of one model in the open update. The staging thread owns it until the seal."""

    def __init__(
        self,
        plan: Plan,
        weights: Mapping[str, Weight],
        form: Form,
        audit: Audit,
        rate_limit: RateLimit,
    ) -> None:
        """``weights``: those of the model, by name."""
        self._plan = plan
        self.audit = audit
        self._weights = {place: weights[place] for place in plan.writers}
        # weights of which moves reach every element
        self._whole = {p for p, weight in self._weights.items() if plan.is_whole(p, weight.live)}
        self._form = form
        self._rate_limit = rate_limit
        self._by_memory: Mapping[int, Sequence[str]] = {}
        # planned tensors that this update brought
        self._came: set[str] = set()
        # weights that the loader writes in this update
        self._loaders: set[str] = set()
        self._keeps = False
        self._check_finite = False
        # each as a row
        self._waiting: list[tuple[str, torch.Tensor]] = []
        self._elements = 0

    def begin(self, *, keeps: bool, by_memory: Mapping[int, Sequence[str]] | None = None) -> None:
        """Begin an update. ``keeps``: elements that are not sent keep their value.

        ``by_memory``: the weights that go by the loader once it reads or writes a memory
        (``memory_key``). None: each has its own, its shadow's.
        """
        self.forget()
        self._came.clear()
        self._loaders.clear()
        self._keeps = keeps
        self.audit.begin()
        if by_memory is None:
            # a commit on a CPU exchanges memory
            by_memory = {memory_key(w.shadow): (place,) for place, w in self._weights.items()}
        self._by_memory = by_memory

    def expect(self, check: Callable[[], None]) -> None:
        """Make the form ready for moves into the planned weights. ``check`` raises to give up."""
        for place, weight in self._weights.items():
            check()
            self._form.expect(weight, keeps=self._keeps or place not in self._whole)

    def forget(self) -> None:
        """Give back the tensors that wait."""
        self._waiting.clear()
        self._elements = 0
        self.audit.forget()

    def begin_call(self, *, check_finite: bool) -> None:
        self._check_finite = check_finite

    def end_call(self) -> None:
        """Move what waits, and audit. Raise ``Refused`` for a wrong value, ``Differs``."""
        self.flush()
        self.audit.run()

    @property
    def has_moved(self) -> bool:
        """Whether the update brought a planned tensor."""
        return bool(self._came)

    @property
    def places(self) -> Iterable[str]:
        """The planned weights, by name."""
        return self._weights

    def has(self, place: str) -> bool:
        """Return whether the weight ``place`` is written by moves alone in this update."""
        return place in self._weights and place not in self._loaders

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Move a tensor, at the latest in ``flush``. Return False if it goes by the loader.

        The tensor stays readable until then. A tensor that comes twice goes by the loader the
        second time, and so does one for a weight that the loader has written.
        """
        moves = self._plan.moves.get(name)
        if moves is None or name in self._came or not self._is_as_planned(name, tensor):
            return False
        if self._loaders and any(each.place in self._loaders for each in moves):
            return False
        self._came.add(name)
        if self.audit.wants(name):
            self.audit.take(name, tensor)
        size = tensor.numel()
        if moves and size:
            if self._elements + size > _MOST_ELEMENTS:
                self.flush()
            self._waiting.append((name, tensor.reshape(-1)))
            self._elements += size
            if len(self._waiting) == _MOST_TENSORS:
                self.flush()
        elif size:
            self._check([(name, tensor.reshape(-1))])
        return True

    def take_sparse(self, sparse: Sparse) -> bool:
        """Move some elements of a tensor. Return False if they go by the loader."""
        name, indices, values, shape, largest = sparse
        moves = self._plan.moves.get(name)
        if moves is None or name in self._came or self._plan.kinds[name].shape != shape:
            return False
        if self._plan.kinds[name].dtype not in FLOATS or not all(map(_is_located, moves)):
            return False
        if any(each.place in self._loaders for each in moves):
            return False
        self._came.add(name)
        self._check_alone(name, largest)
        if not len(indices):
            return True
        at = indices.to(values.device, torch.int64)
        for place, move, through in moves:
            inside, to = locate(move, at)
            cut = cast(values, through)[inside]
            if len(cut):
                self._form.patch(Patch(self._weights[place], to[inside], cut))
            self._rate_limit.spend(5 * at.nbytes)
        return True

    def _is_as_planned(self, name: str, tensor: torch.Tensor) -> bool:
        shape, dtype = self._plan.kinds[name]
        if tensor.shape != shape:
            return False
        return tensor.dtype == dtype or (tensor.dtype in FLOATS and dtype in FLOATS)

    def flush(self) -> None:
        """Check and move what waits. Raise ``Refused`` for a wrong value, by its tensor's name."""
        batch, self._waiting, self._elements = self._waiting, [], 0
        if not batch:
            return
        self._check(batch)
        self._form.move([*self._moved(batch)])
        self._rate_limit.spend(sum(tensor.nbytes for _, tensor in batch))

    def _moved(self, batch: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Moved]:
        moves, weights = self._plan.moves, self._weights
        for name, tensor in paced(batch):
            for place, move, through in moves[name]:
                of = cast(tensor, through) if through else tensor
                if move.of_strides != (1,) or move.sizes != tensor.shape:
                    of = move.source.view(of)
                yield Moved(weights[place], move.target, of)

    # ---- values ----------------------------------------------------------------------------

    def _check(self, batch: list[tuple[str, torch.Tensor]]) -> None:
        """Raise ``Refused`` for NaN and infinity, and for values that a weight cannot hold."""
        if not self._check_finite:
            return
        floats: dict[torch.dtype, list[torch.Tensor]] = {}
        for _, tensor in batch:
            if tensor.dtype in FLOATS:
                floats.setdefault(tensor.dtype, []).append(tensor)
        largest = [self._largest(found) for found in floats.values()]
        if all(each <= HELD_BY_ALL for each in largest):
            return
        for name, tensor in batch:
            if tensor.dtype in FLOATS:
                self._check_alone(name, self._largest([tensor]))

    def _largest(self, rows: list[torch.Tensor]) -> float:
        row = rows[0] if len(rows) == 1 else torch.cat(rows)
        largest = 0.0
        for (piece,) in self._rate_limit.cut(row):
            # the first argument is returned if neither is larger: a piece's NaN must win
            largest = max(largest_magnitude(piece), largest)
            if not math.isfinite(largest):
                break
        return largest

    def _check_alone(self, name: str, largest: float) -> None:
        if not math.isfinite(largest):
            raise Refused(f"tensor {shorten(name)!r} holds NaN or infinity")
        if largest <= HELD_BY_ALL:
            return
        value = torch.tensor(largest, dtype=torch.float64)
        for place, _, through in self._plan.moves[name]:
            for dtype in (*through, self._weights[place].live.dtype):
                if dtype in FLOATS and value.to(dtype).isinf():
                    raise infinite_refusal(name, largest, place, dtype)

    # ---- the model's loader ------------------------------------------------------------------

    def leave(self, memory: int) -> dict[str, frozenset[str]]:
        """Leave the weights behind ``memory`` (``memory_key``) to the loader, before it uses it.

        Return them with the names of the tensors that were moved into each.
        """
        places = [p for p in self._by_memory.get(memory, ()) if p not in self._loaders]
        if not places:
            return {}
        self.flush()
        self._loaders.update(places)
        for place in places:
            self._form.leave(self._weights[place], [*self._sent(place)], keeps=self._keeps)
        return {place: frozenset(self._plan.writers[place] & self._came) for place in places}

    def give_up(self, place: str) -> None:
        """Note that all of the weight ``place`` comes another way."""
        if place in self._weights:
            self._loaders.add(place)

    def _sent(self, place: str) -> Iterator[Box]:
        """Yield where tensors that came were moved to in the weight ``place``."""
        for name in self._plan.writers[place] & self._came:
            for each in self._plan.moves[name]:
                if each.place == place:
                    yield each.move.target

    # ---- the seal ----------------------------------------------------------------------------

    def missing(self, place: str) -> int:
        """Return how many elements did not come of a weight written by moves."""
        return sum(
            each.move.numel
            for name in self._plan.writers[place] - self._came
            for each in self._plan.moves[name]
            if each.place == place
        )


def _is_located(planned: Planned) -> bool:
    return can_locate(planned.move)
