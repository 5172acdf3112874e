"""The two forms in which an update is staged: whole copies of the weights, or their changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from sglang_inflight.scheduler.update.changes.encoding import bits_of
from sglang_inflight.scheduler.update.changes.exchange import Exchange
from sglang_inflight.scheduler.update.changes.recording import Recording
from sglang_inflight.scheduler.update.checks.coverage import (
    can_mark,
    count_marked,
    holds_stray,
    is_finite,
    mark,
    stray_refusal,
)
from sglang_inflight.scheduler.update.checks.dataflow import Recorder
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.plans.moves import Box
from sglang_inflight.scheduler.update.rate import RateLimit, copy_in_pieces, paced
from sglang_inflight.scheduler.update.swap import NumberSwap, PreparedSwap, Swap
from sglang_inflight.scheduler.update.weight import Moved, Patch, Weight
from sglang_inflight.storages import memory_key
from sglang_inflight.tensor_digest import Digest
from sglang_inflight.vocabulary.answers import StagedChanges
from sglang_inflight.vocabulary.errors import Refused


class Form(Protocol):
    """Keeps an open update's weights. Used on the staging thread."""

    @property
    def recorder(self) -> Recorder | None:
        """Takes part in the loader's operations, if not None."""

    @property
    def handle_for(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a weight's handle, or None where a loader addresses a second copy."""

    def begin(self) -> None:
        """Begin an update without any weight."""

    def add(self, weight: Weight, *, keeps: bool, check: Callable[[], None]) -> None:
        """Make ``weight`` ready for the loader's writes.

        ``keeps``: elements that are not sent keep their value. Raises ``Unproven`` if a commit
        could not write the weight, and an update in place can. ``check`` raises to give up.
        """

    def expect(self, weight: Weight, *, keeps: bool) -> None:
        """Make ``weight`` ready for moves. ``keeps``: elements without a move keep their value.

        A weight that gets none is left out of the commit. Raises as ``add``.
        """

    def move(self, moved: Sequence[Moved]) -> None:
        """Stage elements of expected weights. No element is staged twice."""

    def patch(self, patch: Patch) -> None:
        """Stage some elements of an expected weight. No element is staged twice."""

    def leave(self, weight: Weight, sent: Sequence[Box], *, keeps: bool) -> None:
        """Make an expected ``weight`` ready for the loader's writes, too. ``sent``: moved so far.

        ``keeps``: as for ``add``.
        """

    def put(self, weight: Weight, new: torch.Tensor) -> None:
        """Stage ``new`` for all of ``weight``. Both have the same shape, dtype and strides."""

    def leaving_out_nan(self) -> AbstractContextManager[None]:
        """Return a context in which the loader's tensors have NaN where nothing was sent."""

    def show_as_served(self) -> None:
        """Let the loader's tensors show the weights as they will be served."""

    def close(self, *, check_finite: bool) -> None:
        """End the loader's writes. Raises ``Refused`` if some of them were not seen.

        ``check_finite``: no tensor of the update holds NaN, so no weight may get it.
        """

    def keep_if_unwritten(self, weight: Weight) -> None:
        """Keep the live elements of ``weight`` if none was written."""

    def read(self, digest: Digest, name: str, weight: Weight, *, counts: bool) -> Iterator[int]:
        """Read ``weight`` as it will be served into ``digest``, in the name of ``name``.

        Yield, for each piece, how many elements were not written; 0 unless ``counts``.
        """

    def prepare(
        self,
        weights: Sequence[Weight],
        derived: Sequence[tuple[torch.Tensor, torch.Tensor]],
        numbers: Sequence[NumberSwap] = (),
    ) -> PreparedSwap:
        """Return the exchange for the commit of ``weights``, ``derived`` pairs and ``numbers``."""

    def describe(self) -> StagedChanges:
        """Return this rank's part of the receipt."""


def read_live(digest: Digest, name: str, weight: Weight, rate_limit: RateLimit) -> Iterator[int]:
    """Like ``Form.read``, for a weight that the update leaves alone."""
    for piece in digest.read(name, weight.live):
        rate_limit.spend(piece.nbytes)
        yield 0


class WholeCopies:
    """A second copy of each weight. Elements that are not written show by their marks.

    In the mode ``off`` the copies are the weights themselves, and are only read.
    """

    handle_for = None

    def __init__(self, mode: StagingMode, swap: Swap | None, rate_limit: RateLimit) -> None:
        self._mode = mode
        self._swap = swap
        self._rate_limit = rate_limit
        self._recorder: Recorder | None = None
        self._check_finite = False
        # expected weights without a move so far, and whether they keep elements, by the shadow's id
        self._unmoved: dict[int, bool] = {}

    @property
    def recorder(self) -> Recorder | None:
        return self._recorder

    @contextmanager
    def leaving_out_nan(self) -> Iterator[None]:
        self._recorder = _NoNaN(self._rate_limit)
        try:
            yield
        finally:
            self._recorder = None

    def begin(self) -> None:
        self._unmoved.clear()

    def add(self, weight: Weight, *, keeps: bool, check: Callable[[], None]) -> None:
        check()
        assert self._swap is not None
        self._swap.check(*weight)
        if keeps or not can_mark(weight.shadow):
            for to, of in self._rate_limit.cut(weight.shadow, weight.live):
                to.copy_(of)
        else:
            for (piece,) in self._rate_limit.cut(weight.shadow):
                mark(piece)

    def expect(self, weight: Weight, *, keeps: bool) -> None:
        assert self._swap is not None
        self._swap.check(*weight)
        self._unmoved[id(weight.shadow)] = keeps

    def move(self, moved: Sequence[Moved]) -> None:
        to, of = [], []
        for each in paced(moved):
            self._touch(each.weight)
            view = each.box.view(each.weight.shadow.data)
            if self._rate_limit.is_one_piece(2 * view.nbytes):
                to.append(view)
                of.append(each.of)
            else:
                copy_in_pieces(self._rate_limit, view, each.of)
        if to:
            torch._foreach_copy_(to, of)
            self._rate_limit.spend(sum(view.nbytes for view in to))

    def patch(self, patch: Patch) -> None:
        shadow = patch.weight.shadow
        self._touch(patch.weight)
        new = patch.values.to(shadow.device, shadow.dtype)
        bits_of(shadow).index_copy_(0, patch.at.to(shadow.device), bits_of(new))

    def _touch(self, weight: Weight) -> None:
        if self._unmoved.pop(id(weight.shadow), False):
            for to, of in self._rate_limit.cut(weight.shadow, weight.live):
                to.copy_(of)

    def leave(self, weight: Weight, sent: Sequence[Box], *, keeps: bool) -> None:
        if self._unmoved.pop(id(weight.shadow), None) is not None:
            self.add(weight, keeps=keeps, check=_do_nothing)
        elif not keeps:
            came = weight.shadow.detach().clone()
            self.add(weight, keeps=False, check=_do_nothing)
            for box in sent:
                box.view(weight.shadow.data).copy_(box.view(came))

    def put(self, weight: Weight, new: torch.Tensor) -> None:
        self._unmoved.pop(id(weight.shadow), None)
        for to, of in self._rate_limit.cut(weight.shadow, new):
            to.copy_(of)

    def show_as_served(self) -> None:
        pass

    def close(self, *, check_finite: bool) -> None:
        # ``read`` takes the same pass for this and the marks
        self._check_finite = check_finite

    def keep_if_unwritten(self, weight: Weight) -> None:
        shadow = weight.shadow
        if can_mark(shadow) and count_marked(shadow) == shadow.numel():
            shadow.copy_(weight.live)

    def read(self, digest: Digest, name: str, weight: Weight, *, counts: bool) -> Iterator[int]:
        if id(weight.shadow) in self._unmoved:
            yield from read_live(digest, name, weight, self._rate_limit)
            return
        is_marked = counts and can_mark(weight.shadow)
        marked, others = 0, False
        for piece in digest.read(name, weight.shadow):
            self._rate_limit.spend(piece.nbytes)
            if is_marked and not is_finite(piece):
                found = count_marked(piece)
                marked, others = marked + found, others or found == 0
                yield found
            else:
                yield 0
        if others and not marked:
            for new, served in self._rate_limit.cut(weight.shadow, weight.live):
                if holds_stray(new, served, check_finite=self._check_finite):
                    raise stray_refusal(weight.name)

    def prepare(
        self,
        weights: Sequence[Weight],
        derived: Sequence[tuple[torch.Tensor, torch.Tensor]],
        numbers: Sequence[NumberSwap] = (),
    ) -> PreparedSwap:
        pairs = [(w.live, w.shadow) for w in weights if id(w.shadow) not in self._unmoved]
        return PreparedSwap(self._swap, (*pairs, *derived), numbers=tuple(numbers))

    def describe(self) -> StagedChanges:
        return StagedChanges(form=self._mode.name.lower())


class _NoNaN:
    """Copies all elements but NaN, and refuses what may compute with NaN."""

    def __init__(self, rate_limit: RateLimit) -> None:
        self._rate_limit = rate_limit

    def copy(self, to: torch.Tensor, of: torch.Tensor) -> bool:
        for to_piece, of_piece in self._rate_limit.cut(to, of.expand(to.shape)):
            new = of_piece.to(to.device, to.dtype)
            to_piece.copy_(torch.where(new.isnan(), to_piece, new))
        return True

    def touch(self, tensors: Iterable[torch.Tensor]) -> None:
        raise Refused(
            "load_format 'sparse': the model's loader computes with a tensor, and does not only "
            "copy it: send whole tensors, or set SGLANG_INFLIGHT_STAGING=changes"
        )


class Changes:
    """The elements that differ from the live weights. Derived tensors are whole copies."""

    def __init__(self, recording: Recording, swap: Swap, rate_limit: RateLimit) -> None:
        self.recorder = recording
        self.handle_for = recording.handle_for
        self._swap = swap
        self._rate_limit = rate_limit

    def leaving_out_nan(self) -> AbstractContextManager[None]:
        return self.recorder.leaving_out_nan()

    def begin(self) -> None:
        self.recorder.begin()

    def add(self, weight: Weight, *, keeps: bool, check: Callable[[], None]) -> None:
        self._swap.check(*weight)
        self.recorder.add(weight.name, memory_key(weight.shadow), keeps=keeps)

    def expect(self, weight: Weight, *, keeps: bool) -> None:
        # elements without a change are those that are served
        self.add(weight, keeps=True, check=_do_nothing)

    def move(self, moved: Sequence[Moved]) -> None:
        self.recorder.move(moved)

    def patch(self, patch: Patch) -> None:
        self.recorder.patch(patch)

    def leave(self, weight: Weight, sent: Sequence[Box], *, keeps: bool) -> None:
        self.recorder.leave(weight.live, sent, keeps=keeps)

    def put(self, weight: Weight, new: torch.Tensor) -> None:
        # no holes: ``add`` has refused them
        to, of = (t.detach().as_strided((t.numel(),), (1,)) for t in (weight.shadow, new))
        recorded = self.recorder.copy(to, of)
        assert recorded

    def show_as_served(self) -> None:
        self.recorder.read_as_served()

    def close(self, *, check_finite: bool) -> None:
        self.recorder.close(check_finite=check_finite)

    def keep_if_unwritten(self, weight: Weight) -> None:
        self.recorder.keep(weight.live)

    def read(self, digest: Digest, name: str, weight: Weight, *, counts: bool) -> Iterator[int]:
        for piece in digest.read(name, weight.live, self.recorder.as_committed(weight.live)):
            self._rate_limit.spend(piece.nbytes)
            yield 0
        if counts:
            yield self.recorder.unwritten(weight.live)

    def prepare(
        self,
        weights: Sequence[Weight],
        derived: Sequence[tuple[torch.Tensor, torch.Tensor]],
        numbers: Sequence[NumberSwap] = (),
    ) -> PreparedSwap:
        changes = Exchange(self.recorder.changes())
        return PreparedSwap(self._swap, tuple(derived), changes, tuple(numbers))

    def describe(self) -> StagedChanges:
        return self.recorder.describe()


def _do_nothing() -> None:
    pass
