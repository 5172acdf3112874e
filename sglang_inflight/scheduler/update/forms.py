"""The two forms in which an update is staged: whole copies of the weights, or their changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from sglang_inflight.scheduler.plans.targets import Targets
from sglang_inflight.scheduler.update.changes.encoding import bits_of
from sglang_inflight.scheduler.update.changes.exchange import Exchange
from sglang_inflight.scheduler.update.changes.recording import Recording
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import RateLimit, copy_in_pieces, paced
from sglang_inflight.scheduler.update.swap import NumberSwap, PreparedSwap, Swap
from sglang_inflight.scheduler.update.weight import Moved, Patch, Weight
from sglang_inflight.tensor_digest import flat_pieces
from sglang_inflight.vocabulary.answers import StagedChanges


class Form(Protocol):
    """Keeps an open update's weights. Used on the staging thread."""

    def hold(self, weight: Weight) -> None:
        """Take the memory that ``weight`` needs in every update. Raises if there is none."""

    def begin(self) -> None:
        """Begin an update without any weight."""

    def expect(self, weight: Weight, *, keeps: bool) -> None:
        """Make ``weight`` ready. ``keeps``: elements that are not staged keep their value.

        A weight of which nothing is staged is left out of the commit. Raises ``Unproven`` if a
        commit could not write the weight, and an update in place can.
        """

    def move(self, moved: Sequence[Moved]) -> None:
        """Stage elements of expected weights. No element is staged twice, unless forgotten."""

    def move_row(self, targets: Targets, row: torch.Tensor) -> None:
        """Stage a row of few elements, on any device, as ``move`` does."""

    def patch(self, patch: Patch, *, again: bool = False) -> None:
        """Stage some elements of an expected weight. ``again``: some were staged before."""

    def put(self, weight: Weight, new: torch.Tensor) -> None:
        """Stage ``new`` for all of ``weight``, whatever was staged of it.

        Both have the same shape, dtype and strides.
        """

    def forget(self, weight: Weight, start: int, end: int) -> None:
        """Let the elements from position ``start`` to ``end`` be staged once more."""

    def fill(self, weight: Weight, memory: torch.Tensor) -> None:
        """Write ``weight`` as it will be served into ``memory``, of its layout, on any device."""

    def as_committed(self, weight: Weight) -> Iterable[torch.Tensor]:
        """Yield ``weight`` as it will be served, flat, piece by piece, in its elements' order."""

    def prepare(
        self, weights: Sequence[Weight], numbers: Sequence[NumberSwap] = ()
    ) -> PreparedSwap:
        """Return the exchange for the commit of ``weights`` and ``numbers``."""

    def describe(self) -> StagedChanges:
        """Return this rank's part of the receipt."""


class WholeCopies:
    """A second copy of each weight."""

    def __init__(
        self,
        mode: StagingMode,
        swap: Swap,
        rate_limit: RateLimit,
        storage_for: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """``storage_for`` returns memory for the copy of a weight."""
        self._mode = mode
        self._swap = swap
        self._rate_limit = rate_limit
        self._storage_for = storage_for
        # weights and their copies, by the weight's id, which is kept unique by the reference
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # whether expected weights without an element so far keep the others, by id
        self._untouched: dict[int, bool] = {}
        self._staged: set[int] = set()

    def hold(self, weight: Weight) -> None:
        self._copy_of(weight)

    def _copy_of(self, weight: Weight) -> torch.Tensor:
        key = id(weight.live)
        if key not in self._copies:
            self._copies[key] = weight.live, self._storage_for(weight.live)
        return self._copies[key][1]

    def begin(self) -> None:
        self._untouched.clear()
        self._staged.clear()

    def expect(self, weight: Weight, *, keeps: bool) -> None:
        self._swap.check(weight.name, weight.live)
        self._untouched[id(weight.live)] = keeps

    def move(self, moved: Sequence[Moved]) -> None:
        to, of = [], []
        for each in paced(moved):
            view = each.box.view(self._touch(each.weight))
            if self._rate_limit.is_one_piece(2 * view.nbytes):
                to.append(view)
                of.append(each.of)
            else:
                copy_in_pieces(self._rate_limit, view, each.of)
        if to:
            torch._foreach_copy_(to, of)
            self._rate_limit.spend(sum(view.nbytes for view in to))

    def move_row(self, targets: Targets, row: torch.Tensor) -> None:
        targets.copy([self._touch(weight) for weight in targets.weights], row)
        self._rate_limit.spend(row.nbytes)

    def patch(self, patch: Patch, *, again: bool = False) -> None:
        copy = self._touch(patch.weight)
        new = patch.values.to(copy.device, copy.dtype)
        bits_of(copy).index_copy_(0, patch.at.to(copy.device), bits_of(new))

    def _touch(self, weight: Weight) -> torch.Tensor:
        key = id(weight.live)
        copy = self._copy_of(weight).data
        if key not in self._staged:
            self._staged.add(key)
            if self._untouched.pop(key):
                for to, of in self._rate_limit.cut(copy, weight.live):
                    to.copy_(of)
        return copy

    def put(self, weight: Weight, new: torch.Tensor) -> None:
        self._untouched.pop(id(weight.live), None)
        self._staged.add(id(weight.live))
        for to, of in self._rate_limit.cut(self._copy_of(weight), new):
            to.copy_(of)

    def forget(self, weight: Weight, start: int, end: int) -> None:
        pass

    def fill(self, weight: Weight, memory: torch.Tensor) -> None:
        for to, of in self._rate_limit.cut(memory, self._served_then(weight)):
            to.copy_(of)

    def _served_then(self, weight: Weight) -> torch.Tensor:
        return self._copy_of(weight) if id(weight.live) in self._staged else weight.live

    def as_committed(self, weight: Weight) -> Iterable[torch.Tensor]:
        return flat_pieces(self._served_then(weight))

    def prepare(
        self, weights: Sequence[Weight], numbers: Sequence[NumberSwap] = ()
    ) -> PreparedSwap:
        pairs = [(w.live, self._copy_of(w)) for w in weights if id(w.live) in self._staged]
        return PreparedSwap(self._swap, tuple(pairs), numbers=tuple(numbers))

    def describe(self) -> StagedChanges:
        return StagedChanges(form=self._mode.name.lower())

    def free(self) -> None:
        """Free all copies, even those still referenced elsewhere."""
        for _, copy in self._copies.values():
            copy.data = copy.data.new_empty(0)
        self._copies.clear()


class Changes:
    """The elements that differ from the live weights."""

    def __init__(self, recording: Recording, swap: Swap, rate_limit: RateLimit) -> None:
        self._recording = recording
        self._swap = swap
        self._rate_limit = rate_limit

    def hold(self, weight: Weight) -> None:
        pass

    def begin(self) -> None:
        self._recording.begin()

    def expect(self, weight: Weight, *, keeps: bool) -> None:
        # elements without a change are those that are served
        self._swap.check(weight.name, weight.live)
        self._recording.add(weight)

    def move(self, moved: Sequence[Moved]) -> None:
        self._recording.move(moved)

    def move_row(self, targets: Targets, row: torch.Tensor) -> None:
        self._recording.move_rows(targets, [row])

    def patch(self, patch: Patch, *, again: bool = False) -> None:
        if again:
            self._recording.forget_at(patch.weight.live, patch.at)
        self._recording.patch(patch)

    def put(self, weight: Weight, new: torch.Tensor) -> None:
        self._recording.put(weight.live, new)

    def forget(self, weight: Weight, start: int, end: int) -> None:
        self._recording.forget(weight.live, start, end)

    def fill(self, weight: Weight, memory: torch.Tensor) -> None:
        self._recording.fill(weight.live, memory)

    def as_committed(self, weight: Weight) -> Iterable[torch.Tensor]:
        return self._recording.as_committed(weight.live)

    def prepare(
        self, weights: Sequence[Weight], numbers: Sequence[NumberSwap] = ()
    ) -> PreparedSwap:
        changes = Exchange(self._recording.changes())
        return PreparedSwap(self._swap, (), changes, tuple(numbers))

    def describe(self) -> StagedChanges:
        return self._recording.describe()
