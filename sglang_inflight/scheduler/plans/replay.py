"""Moves the tensors of an update to where the plan of their model says.

    bulk       the tensors of a layout that comes again are moved at once (``bulk.py``)
    take       a tensor of the plan waits in a batch
    flush      the batch is checked, and moved at once by the form of the update
    leave      the model's loader is about to write a weight of the plan, for a tensor that is in no
               plan: the weight is the loader's for the rest of the update

So a planned tensor costs the interpreter some microseconds, and its model's loader is not asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch

from sglang_inflight.scheduler.plans.audit import Audit
from sglang_inflight.scheduler.plans.bulk import Bulk
from sglang_inflight.scheduler.plans.moves import (
    Box,
    can_locate,
    without_repeats,
)
from sglang_inflight.scheduler.plans.parts import Parts, parts_of
from sglang_inflight.scheduler.plans.patches import patches_of
from sglang_inflight.scheduler.plans.plan import Plan, cast
from sglang_inflight.scheduler.plans.recorder import Planned
from sglang_inflight.scheduler.plans.targets import joined
from sglang_inflight.scheduler.update.checks.coverage import largest_magnitude
from sglang_inflight.scheduler.update.checks.tensors import FLOATS, HELD_BY_ALL, infinite_refusal
from sglang_inflight.scheduler.update.forms import Form
from sglang_inflight.scheduler.update.rate import RateLimit, paced
from sglang_inflight.scheduler.update.sources.sparse import Sparse, find_largest, largest_in
from sglang_inflight.scheduler.update.sources.stretch import Stretch
from sglang_inflight.scheduler.update.weight import Moved, Patch, Weight
from sglang_inflight.vocabulary.errors import Refused, shorten

# elements and tensors that wait at most; a larger tensor waits for none
_MOST_ELEMENTS = 1 << 20
_MOST_TENSORS = 512
# places of one element of a tensor that comes in parts
_MOST_REPEATS = 64


class Replay:
    """The plan of one model in the open update. The staging thread owns it until the seal."""

    def __init__(
        self,
        plan: Plan,
        weights: Mapping[str, Weight],
        form: Form,
        audit: Audit,
        rate_limit: RateLimit,
        planned: Collection[str],
        on_whole: Callable[[Weight], None],
    ) -> None:
        """``weights``: those of the model, by name. ``planned``: the planned ones, also those that
        another model owns. ``on_whole`` is called with a weight once all its tensors are moved.
        """
        self._plan = self._whole_plan = plan
        # made for the first call with parts
        self._parts: Parts | None = None
        self.audit = audit
        self.planned = planned
        self._weights = {place: weights[place] for place in plan.writers}
        # weights of which moves reach every element
        self._whole = {p for p, weight in self._weights.items() if plan.is_whole(p, weight.live)}
        self._form = form
        self._rate_limit = rate_limit
        # planned tensors that this update brought
        self._came: set[str] = set()
        # weights that the loader writes in this update
        self._loaders: set[str] = set()
        self._on_whole = on_whole
        # how many tensors of a weight were not moved yet, and the weights that wait for none
        self._due: dict[str, int] = {}
        self._now_whole: list[str] = []
        self._check_finite = False
        # gone with their stretches
        self._bulks: WeakKeyDictionary[Stretch, Bulk] = WeakKeyDictionary()
        # each as a row; tensors that came before wait apart
        self._waiting: list[tuple[str, torch.Tensor]] = []
        self._again: list[tuple[str, torch.Tensor]] = []
        # parts of tensors; a call brings no others
        self._sparse: list[Sparse] = []
        # how many were taken, and are not moved yet
        self._owed = 0
        self._elements = 0

    def begin(self) -> None:
        """Begin an update."""
        self.forget()
        self._came.clear()
        self._loaders.clear()
        self._due = {place: len(names) for place, names in self._whole_plan.writers.items()}
        self._now_whole.clear()
        self.audit.begin()

    def is_whole(self, place: str) -> bool:
        """Return whether moves reach every element of the weight ``place``."""
        return place in self._whole

    def forget(self) -> None:
        """Give back the tensors that wait."""
        self._waiting.clear()
        self._again.clear()
        self._sparse.clear()
        self._elements = self._owed = 0
        self.audit.forget()

    @property
    def parts(self) -> Parts:
        """The parts of tensors that this rank uses."""
        if self._parts is None:
            self._parts = parts_of(self._whole_plan, self._whole_plan.by_loader)
        return self._parts

    def begin_call(self, *, check_finite: bool, by_parts: bool = False) -> None:
        """``by_parts``: the call brings ``parts`` of tensors. Others are not taken."""
        self._check_finite = check_finite
        # both write the same places, so that what came by one has come for the other
        self._plan = self.parts.plan if by_parts else self._whole_plan

    def end_call(self) -> None:
        """Move what waits, and audit. Raise ``Refused`` for a wrong value, ``Differs``."""
        self.flush()
        self._flush_sparse()
        if self._owed:
            raise RuntimeError(f"{self._owed} tensors were taken and not moved")
        self.audit.run()

    @property
    def has_moved(self) -> bool:
        """Whether the update brought a planned tensor."""
        return bool(self._came)

    def has(self, place: str) -> bool:
        """Return whether the weight ``place`` is written by moves alone in this update."""
        return place in self._weights and place not in self._loaders

    def needs(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Return False if ``take`` uses nothing of such a tensor, as of one of another rank."""
        moves = self._plan.moves.get(name)
        return moves != () or name in self._came or not self._plan.is_as_planned(name, shape, dtype)

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Move a tensor, at the latest in ``flush``. Return False if it goes by the loader.

        The tensor stays readable until then. It may have no memory where ``needs`` is False. A
        tensor for a weight that the loader has used goes by the loader. The last tensor of a name
        counts.
        """
        moves = self._plan.moves.get(name)
        if moves is None or not self._plan.is_as_planned(name, tensor.shape, tensor.dtype):
            return False
        if self._loaders and any(each.place in self._loaders for each in moves):
            return False
        is_again = name in self._came
        if not is_again and self.audit.wants(name):
            self._audit(name, tensor)
        self._came.add(name)
        size = tensor.numel()
        if moves and size:
            if self._elements + size > _MOST_ELEMENTS:
                self.flush()
            # a flush has begun new lists
            (self._again if is_again else self._waiting).append((name, tensor.reshape(-1)))
            self._elements += size
            self._owed += 1
            if len(self._waiting) + len(self._again) >= _MOST_TENSORS:
                self.flush()
        elif size and not tensor.is_meta:
            self._check([(name, tensor.reshape(-1))])
        return True

    def take_bulk(self, stretch: Stretch, row: torch.Tensor | None) -> Bulk | None:
        """Move a stretch of tensors, less those that go one by one.

        ``row``: a row of uint8 with the stretch's bytes, or None where ``needs`` is False for each.
        Return None if all go one by one.
        """
        bulk = self._bulks.get(stretch)
        if bulk is None:
            bulk = self._bulks[stretch] = Bulk(stretch, self._plan, self._weights)
        is_fresh = self._came.isdisjoint(bulk.names) and self._loaders.isdisjoint(bulk.places)
        if not bulk.names or not is_fresh or (row is None and bulk.places):
            return None
        if row is not None:
            if self._check_finite:
                largest = [self._largest([floats]) for floats in bulk.floats(row)]
                if not all(each <= HELD_BY_ALL for each in largest):
                    # one by one, and the wrong one is refused by its name
                    return None
            if wanted := self.audit.wanted_of(bulk.names):
                names = enumerate(stretch.names)
                those = [at for at, name in names if isinstance(name, str) and name in wanted]
                for name, tensor in stretch.tensors(row, those):
                    self._audit(name, tensor)
            self.flush()
            bulk.move(row, self._form)
            self._rate_limit.spend(bulk.nbytes)
        self._came |= bulk.names
        for place, tensors in bulk.counts.items():
            self._note_moved(place, tensors)
        self._tell_whole()
        return bulk

    def _audit(self, name: str, tensor: torch.Tensor) -> None:
        shape = self._whole_plan.kinds[name].shape
        if tensor.shape != shape:
            # the loader takes a whole tensor, and the moves look at nothing beside the part
            whole = tensor.new_zeros(shape)
            whole[self.parts.wanted[name].slices()] = tensor
            tensor = whole
        self.audit.take(name, tensor)

    def take_sparse(self, sparse: Sparse) -> bool:
        """Move some elements of a tensor, at the latest in ``end_call``.

        Return False if no plan says where they go.
        """
        name = sparse.name
        moves = self._plan.moves.get(name)
        if moves is None or self._plan.kinds[name].shape != sparse.shape:
            return False
        if self._plan.kinds[name].dtype not in FLOATS or not all(map(_is_located, moves)):
            return False
        if any(each.place in self._loaders for each in moves):
            return False
        self.flush()
        is_again = name in self._came
        self._came.add(name)
        if is_again:
            self._patch([sparse], again=True)
            return True
        self._sparse.append(sparse)
        self._elements += len(sparse.values)
        if len(self._sparse) >= _MOST_TENSORS or self._elements > _MOST_ELEMENTS:
            self._flush_sparse()
        return True

    def _flush_sparse(self) -> None:
        batch, self._sparse, self._elements = self._sparse, [], 0
        if batch:
            self._patch(batch, again=False)

    def _patch(self, batch: Sequence[Sparse], *, again: bool) -> None:
        largest = largest_in(batch)
        if largest is None or largest > HELD_BY_ALL:
            for sparse in batch:
                self._check_alone(sparse.name, find_largest(sparse))
        for patch in patches_of(batch, self._plan.moves, self._weights):
            self._form.patch(patch, again=again)
            self._rate_limit.spend(5 * patch.at.nbytes)

    def flush(self) -> None:
        """Check and move what waits. Raise ``Refused`` for a wrong value, by its tensor's name.

        Parts of tensors wait on: ``end_call`` moves them.
        """
        if not self._waiting and not self._again:
            return
        batch, again = self._waiting, self._again
        self._waiting, self._again, self._elements = [], [], 0
        self._check(batch + again)
        if batch:
            self._form.move([*self._moved(batch)])
            for name, _ in batch:
                for place in {each.place for each in self._whole_plan.moves[name]}:
                    self._note_moved(place, 1)
        for moved in self._moved(again):
            self._move_again(moved)
        self._owed -= len(batch) + len(again)
        self._rate_limit.spend(sum(tensor.nbytes for _, tensor in batch + again))
        self._tell_whole()

    def _note_moved(self, place: str, tensors: int) -> None:
        """Note that all moves of ``tensors`` more of a weight were made."""
        if place in self._due:
            self._due[place] -= tensors
            if not self._due[place]:
                self._now_whole.append(place)

    def _tell_whole(self) -> None:
        while self._now_whole:
            place = self._now_whole.pop()
            if place not in self._loaders:
                self._on_whole(self._weights[place])

    def _move_again(self, moved: Moved) -> None:
        weight, box, of = moved
        if box.is_range:
            self._form.forget(weight, box.offset, box.end)
            self._form.move([moved])
        else:
            patch = Patch(weight, box.positions(of.device), of.reshape(-1))
            self._form.patch(patch, again=True)

    def _moved(self, batch: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Moved]:
        moves, weights = self._plan.moves, self._weights
        for name, tensor in paced(batch):
            for each in moves[name]:
                move, through = each.move, each.through
                of = cast(tensor, through) if through else tensor
                if move.of_strides != (1,) or move.sizes != tensor.shape:
                    of = move.source.view(of)
                yield Moved(weights[each.place], move.target, of)

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
        largest = 0.0
        for (piece,) in self._rate_limit.cut(joined(rows)):
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
        for each in self._plan.moves[name]:
            for dtype in (*each.through, self._weights[each.place].live.dtype):
                if dtype in FLOATS and value.to(dtype).isinf():
                    raise infinite_refusal(name, largest, each.place, dtype)

    # ---- the model's loader ------------------------------------------------------------------

    def leave(self, places: Iterable[str]) -> dict[str, frozenset[str]]:
        """Leave those of the weights ``places`` to the loader that are not yet, before it uses one.

        Return them with the names of the tensors that were moved into each.
        """
        left = [place for place in places if self.has(place)]
        if left:
            self.flush()
        self._loaders.update(left)
        return {place: frozenset(self._plan.writers[place] & self._came) for place in left}

    def give_up(self, place: str) -> None:
        """Note that all of the weight ``place`` comes another way."""
        if place in self._weights:
            self._loaders.add(place)

    def sent(self, place: str) -> Iterator[Box]:
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
    move = planned.move
    repeats = [size for size, of in zip(move.sizes, move.of_strides, strict=True) if not of]
    return math.prod(repeats) <= _MOST_REPEATS and can_locate(without_repeats(move)[0])
