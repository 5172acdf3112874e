"""Phase one of an update: fill the shadow weights while decoding goes on.

    state    meaning                                   moves to
    EMPTY    the shadow holds the previous version,    OPEN
             or nothing of worth
    OPEN     the staging thread fills the shadow       SEALED, EMPTY (failed, dropped)
    SEALED   complete and checked: this rank's vote    EMPTY (committed, dropped)

A rank votes by answering the ``SealCall``. The front end, which hears every rank of every
replica, decides: a commit if all voted for it in time, otherwise a drop. So no rank waits
for another one, neither in its loop nor in its staging thread, and a rank that dies or
hangs fails the update and nothing else.
"""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.load_config import LoadConfig

from sglang_inflight.errors import Conflict, Refused
from sglang_inflight.messages import (
    A,
    DiskSource,
    DistributedSource,
    Done,
    DropCall,
    GiveUpTransferCall,
    IPCSource,
    JoinGroupCall,
    LeaveGroupCall,
    OpenCall,
    SealCall,
    Selector,
    StageCall,
    Staged,
    TensorSource,
    TimedCall,
    TransferGivenUp,
    Voted,
)
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.collectives import is_true_of_any
from sglang_inflight.scheduler.metrics import Metrics
from sglang_inflight.scheduler.update.checks.coverage import can_mark, count_marked, mark
from sglang_inflight.scheduler.update.checks.derived import why_not_shadowed
from sglang_inflight.scheduler.update.checks.digest import Digest
from sglang_inflight.scheduler.update.mode import StagingMode, choose_mode
from sglang_inflight.scheduler.update.reservation import Reservation
from sglang_inflight.scheduler.update.shadow import Twins
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel
from sglang_inflight.scheduler.update.shadows import Shadows
from sglang_inflight.scheduler.update.sources.broadcast import receive
from sglang_inflight.scheduler.update.sources.checkpoint_engine import receive_ipc
from sglang_inflight.scheduler.update.sources.disk import read_disk
from sglang_inflight.scheduler.update.sources.groups import Groups
from sglang_inflight.scheduler.update.sources.tensors import read_tensors
from sglang_inflight.scheduler.update.sources.weights import Weights
from sglang_inflight.scheduler.update.throttle.rate import Pace, choose_pace
from sglang_inflight.scheduler.update.update import Update
from sglang_inflight.scheduler.update.worker import (
    InlineWorker,
    Job,
    StagingWorker,
    streams_of,
)
from sglang_inflight.settings import Settings
from sglang_inflight.status import StagingStatus
from sglang_inflight.unsupported import why_no_pause, why_no_update

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_inflight.scheduler.boundary import Boundary


class StagingState(enum.Enum):
    EMPTY = "empty"
    OPEN = "open"
    SEALED = "sealed"


class Staging:
    """The shadow weights of one rank.

    The scheduler's thread moves the state and puts jobs in; the jobs run on the staging
    thread, one after the other. A drop sets a mark that the running job looks at between
    two tensors; whatever it had written is never committed.

    In the mode ``off`` there is no shadow: jobs run on the scheduler's thread, at the
    boundary, and write the live weights. From the first write on the weights are dirty,
    and the loop makes no step, until a commit. If there is none, they stay dirty.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        boundary: Boundary,
        answers: AnswerChannel,
        metrics: Metrics,
        settings: Settings,
        *,
        is_busy: Callable[[], bool],
    ) -> None:
        """``is_busy`` says, to any thread, whether requests run."""
        self._answers = answers
        self._metrics = metrics
        self._settings = settings
        reservation: Reservation | None = scheduler.inflight_reservation
        twins = Twins(reservation.storage if reservation is not None else {})
        self._models = [
            ShadowedModel(role, runner, twins, on_write=self._note_write)
            for role, runner in scheduler.weight_updater._select_runners("all")
        ]
        self._shadows = Shadows(self._models, twins)
        self._device = next(self._models[0].runner.model.parameters()).device
        if reservation is not None:
            self.mode = reservation.mode
        else:
            nbytes = sum(model.nbytes for model in self._models)
            self.mode = choose_mode(settings.staging, nbytes, self._device)
        # in place nothing decodes meanwhile
        in_place = self.mode is StagingMode.OFF
        bytes_per_s = 0 if in_place else choose_pace(settings.pace_bytes_per_s, self._device)
        self._pace = Pace(bytes_per_s, is_busy)
        self._worker: StagingWorker | InlineWorker = (
            InlineWorker(answers, boundary.drain)
            if in_place
            else StagingWorker(
                answers, self._device, settings.stage_nice, functools.partial(streams_of, scheduler)
            )
        )
        self._groups = Groups(settings.group_timeout_s)
        self._update: Update | None = None
        self._holds_previous = False
        self._exchange_event: Any = None
        # Of the live weights, once it is known. The staging thread sets it while an update
        # is open, the scheduler's thread at a commit, when none is.
        self.live_digest: str | None = None
        # why the live weights are a mixture; only in the mode "off"
        self.dirty: str | None = None
        self.refusal = self._why_refused()

    # ---- calls, on the scheduler's thread ----------------------------------------

    def open(self, call: OpenCall, *, current_version: str) -> None:
        if self.refusal is not None:
            raise Refused(self.refusal)
        if self._update is not None:
            raise Conflict("another weight update is open: end or abort it first")
        if call.expected_version is not None and call.expected_version != current_version:
            raise Conflict(
                f"expected_version is {call.expected_version!r}, but {current_version!r} is serving"
            )
        if self.dirty is not None and call.partial:
            raise Refused(f"only a whole update (partial=false) can mend the weights: {self.dirty}")
        update = self._update = Update(call)
        self._holds_previous = False
        self._submit(update, call, lambda: self._prepare(update, call))

    def stage(self, call: StageCall) -> None:
        try:
            update = self._expect(call.update_id, StagingState.OPEN)
            self._submit(update, call, lambda: self._fill(update, call))
        finally:
            if self.mode is StagingMode.OFF:
                self._share_dirt()

    def seal(self, call: SealCall) -> None:
        update = self._expect(call.update_id, StagingState.OPEN)
        self._submit(update, call, lambda: self._finish(update))

    def drop(self, call: DropCall) -> None:
        """Forget an update. It is no error if this rank never had it."""
        update = self._update
        if update is not None and update.id == call.update_id:
            update.dropped = call.reason
            self._update = None
        # answered when the staging thread has let go of the shadow
        self._worker.submit(call, Done)

    def take(self, update_id: str) -> Update:
        """The sealed update, to be committed now."""
        update = self._expect(update_id, StagingState.SEALED)
        self._update = None
        return update

    def join_group(self, call: JoinGroupCall) -> None:
        """Answered by a thread of the rendezvous' own: no update waits behind it."""
        self._groups.join(call, self._answers)

    def leave_group(self, call: LeaveGroupCall) -> None:
        self._groups.stop_joining(call.group_name, "the group was left")
        # after the job that may still be receiving in it
        self._worker.submit(call, _done_after(lambda: self._groups.leave(call.group_name)))

    def give_up_transfer(self, call: GiveUpTransferCall) -> None:
        def job() -> TransferGivenUp:
            return TransferGivenUp(broken=self._groups.give_up(call))

        # after the job that may still be taking it in
        self._worker.submit(call, job)

    def exchange(self, roles: Iterable[str]) -> int:
        """Swap live weights and shadow of ``roles``; the bytes swapped."""
        if self.mode is StagingMode.OFF:
            self.dirty = None
            return 0
        swapped = 0
        for _, _, live, shadow in self._weights(roles):
            self._shadows.exchange.swap(live, shadow)
            swapped += live.nbytes
        self._holds_previous = True
        return swapped

    def why_no_rollback(self) -> str | None:
        """Why the shadow does not hold the previous version, or None where it does."""
        if self.mode is StagingMode.OFF:
            return "updates are written in place (SGLANG_INFLIGHT_STAGING=off)"
        if self.state is not StagingState.EMPTY:
            return "an update is being staged over it"
        if not self._holds_previous:
            return "nothing was committed since the start or since the last failed update"
        return None

    def wait_for(self, event: Any) -> None:
        """Do not write the shadow before ``event`` on its device."""
        self._exchange_event = event

    @property
    def state(self) -> StagingState:
        if self._update is None:
            return StagingState.EMPTY
        return StagingState.SEALED if self._update.sealed else StagingState.OPEN

    def note_checkpoints(self, update: Update) -> None:
        """Tell upstream's readers of the path where the weights came from."""
        for model in self._models:
            if (source := update.checkpoints.get(model.role)) is not None:
                load_format = source.load_format or "auto"
                model.runner.update_model_fields(
                    model.runner.model,
                    model_path=source.model_path,
                    load_format=load_format,
                    load_config=LoadConfig(load_format=load_format),
                )
                model.runner.model_config.model_path = source.model_path

    def describe(self) -> StagingStatus:
        update = self._update
        return StagingStatus(
            mode=self.mode.name.lower(),
            state=self.state.value,
            update_id=update.id if update else None,
            tensors=update.tensors if update else 0,
            bytes=update.bytes if update else 0,
            can_roll_back=self.why_no_rollback() is None,
            dirty=self.dirty,
            refusal=self.refusal,
            groups=self._groups.describe(),
        )

    def _why_refused(self) -> str | None:
        """Why no update can be taken in, or None where it can."""
        in_place = self.mode is StagingMode.OFF
        if in_place and (reason := why_no_pause()) is not None:
            return f"weights cannot be written in place, between two steps: {reason}"
        if (reason := why_no_update(in_place=in_place)) is not None:
            return reason
        return self._why_not_shadowed()

    def _why_not_shadowed(self) -> str | None:
        for model in self._models:
            if (reason := why_not_shadowed(model.runner.model)) is not None:
                return f"weights of the {model.role} model cannot be staged: {reason}"
        return None

    def _expect(self, update_id: str, state: StagingState) -> Update:
        update = self._update
        if update is None or update.id != update_id or self.state is not state:
            raise Conflict(f"no weight update {update_id!r} is {state.value}")
        return update

    def _submit(self, update: Update, call: TimedCall[A], job: Job[A]) -> None:
        def one_failure_fails_the_update() -> A:
            try:
                update.allow(call.timeout_s)
                update.check()
                return job()
            except Exception as error:
                update.failed = update.failed or str(error)
                raise

        self._worker.submit(call, one_failure_fails_the_update)

    # ---- jobs, on the staging thread ---------------------------------------------

    def _prepare(self, update: Update, call: OpenCall) -> Done:
        """Start from the live weights, or from marks that show what was not written.

        The live weights are only read, and only the loop's thread changes them, in a
        commit, which cannot be while an update is open.
        """
        models = self._select(self._models, call.selector)
        if not models:
            raise Refused(f"selector {call.selector!r} selects no model of this server")
        # looked at again, because serving may have made copies of weights since
        if (reason := self._why_not_shadowed()) is not None:
            raise Refused(reason)
        update.roles = {model.role for model in models}
        for model in self._models:
            model.read_served(update.check)
        self._shadows.build(self.mode, self._device)
        if self._exchange_event is not None:
            self._exchange_event.synchronize()
        if self.mode is StagingMode.OFF:
            return Done()
        for model, name, live, shadow in self._weights(update.roles):
            update.check()
            self._shadows.exchange.check(name, live, shadow)
            if self._is_partial(update, model) or not can_mark(shadow):
                for to, of in self._pace.cut(shadow, live):
                    to.copy_(of)
            else:
                for (piece,) in self._pace.cut(shadow):
                    mark(piece)
        return Done()

    def _fill(self, update: Update, call: StageCall) -> Staged:
        """Load one call's tensors into the shadow, through the model's own loader."""
        update.check()
        started = time.perf_counter()
        staged = [model for model in self._models if model.role in update.roles]
        models = self._select(staged, call.selector)
        if not models:
            raise Refused(f"selector {call.selector!r} selects no model of this update")
        guards = []
        for model, weights in self._read_for_each(models, update, call):
            # closed at once, because the sender waits to hear how it ended
            with closing(weights):
                guard = model.load(
                    call.source,
                    self._counted(update, weights),
                    takes_all=model is models[0],
                    check_finite=self._settings.check_finite,
                    pace=self._pace,
                )
            update.names |= guard.names
            guards.append(guard)
            if isinstance(call.source, DiskSource):
                update.checkpoints[model.role] = call.source
        staged_s = time.perf_counter() - started
        self._metrics.staged_seconds.inc(staged_s)
        self._metrics.staged_bytes.inc(guards[0].bytes)
        return Staged(staged_s=staged_s, tensors=guards[0].tensors, bytes=guards[0].bytes)

    def _read_for_each(
        self, models: list[ShadowedModel], update: Update, call: StageCall
    ) -> Iterator[tuple[ShadowedModel, Weights]]:
        """A target and its drafts load the same tensors, which most sources have only once."""
        source = call.source
        if isinstance(source, DiskSource):
            for model in models:
                weights = read_disk(
                    source,
                    model.runner,
                    of_draft=model.role != "target",
                    check=update.check,
                    pace=self._pace,
                )
                yield model, weights
        elif len(models) == 1:
            yield models[0], self._read_once(source, update)
        else:
            with closing(self._read_once(source, update)) as weights:
                # copied, because the memory may be the sender's
                kept = [
                    (name, tensor.clone() if isinstance(tensor, torch.Tensor) else tensor)
                    for name, tensor in weights
                ]
            for model in models:
                yield model, (pair for pair in kept)

    def _read_once(
        self, source: TensorSource | DistributedSource | IPCSource, update: Update
    ) -> Weights:
        if isinstance(source, TensorSource):
            return read_tensors(source, self._device, update.check)
        if isinstance(source, DistributedSource):
            return receive(source, self._groups, self._device, update.check)
        return receive_ipc(source, self._device, update.check)

    def _counted(self, update: Update, weights: Weights) -> Weights:
        for name, tensor in weights:
            update.check()
            if isinstance(tensor, torch.Tensor):
                update.bytes += tensor.nbytes
            update.tensors += 1
            yield name, tensor

    def _note_write(self) -> None:
        if self.mode is StagingMode.OFF:
            self.dirty = "an update was written in place and not completed"
            self.live_digest = None

    def _share_dirt(self) -> None:
        """Ranks that step together are dirty together: one alone would wait for the other."""
        if is_true_of_any(self.dirty is not None):
            self._note_write()

    def _finish(self, update: Update) -> Voted:
        """Check that the update is whole; after this nothing can fail any more."""
        update.check()
        started = time.perf_counter()
        if update.tensors == 0:
            raise Refused("the update holds no tensor")
        if self.live_digest is None:
            self.live_digest = self._read_through(update, set(), set())
        whole = {m.role for m in self._models if not self._is_partial(update, m)} & update.roles
        if self.mode is StagingMode.OFF:
            self._check_all_sent(update, whole)
            whole = set()
        else:
            for model in self._models:
                if model.role in update.roles:
                    model.refuse_if_derived()
        update.digest = self._read_through(update, update.roles, whole)
        update.check()
        update.sealed = True
        return Voted(staged_s=time.perf_counter() - started)

    def _read_through(self, update: Update, shadowed: set[str], whole: set[str]) -> str:
        """The digest of all models of this rank, those of ``shadowed`` as they will be.

        In the same reading, all elements of those of ``whole`` must have been written.
        """
        digest = Digest()
        roles = {model.role for model in self._models}
        for model, name, live, shadow in self._weights(roles):
            tensor = shadow if model.role in shadowed else live
            is_marked = model.role in whole and can_mark(tensor)
            missing = 0
            for piece in digest.read(f"{model.role}.{name}", tensor):
                update.check()
                missing += count_marked(piece) if is_marked else 0
                self._pace.spend(piece.nbytes)
            if missing:
                unsent = self._unsent(update, whole)
                raise Refused(
                    f"the update is not complete: {missing} of {tensor.numel()} elements of "
                    f"{name!r} were not sent"
                    + (f"; not sent: {_list(unsent)}" if unsent else "")
                    + ". Send them, or set partial=true"
                )
        return digest.hexdigest()

    def _check_all_sent(self, update: Update, whole: set[str]) -> None:
        """By name only: what is written in place bears no marks."""
        if unsent := self._unsent(update, whole):
            raise Refused(f"the update is not complete: {_list(unsent)} were not sent")

    def _unsent(self, update: Update, whole: set[str]) -> list[str]:
        served = {name for m in self._models if m.role in whole for name in m.served}
        return sorted(served - update.names)

    def _weights(
        self, roles: Iterable[str]
    ) -> Iterator[tuple[ShadowedModel, str, torch.Tensor, torch.Tensor]]:
        """Model, name, live weight and shadow: once each, also what a draft shares."""
        wanted, seen = set(roles), set[int]()
        for model in self._models:
            if model.role not in wanted:
                continue
            for name, live, shadow in model.shadow.pairs:
                if id(shadow) not in seen:
                    seen.add(id(shadow))
                    yield model, name, live, shadow

    def _is_partial(self, update: Update, model: ShadowedModel) -> bool:
        # a draft takes what it shares with the target and keeps the rest
        return update.partial or model.role != "target"

    def _select(
        self, models: list[ShadowedModel], selector: Selector | None
    ) -> list[ShadowedModel]:
        """Those of ``models`` that a call is for.

        Where it does not say, it is for the first, which is the target if that is among them,
        and for those that were loaded from the same checkpoint. A draft with one of its own
        (EAGLE, STANDALONE) may have tensors of the same names that mean something else.
        """
        if selector is None:
            return [model for model in models if model.checkpoint == models[0].checkpoint]
        return [m for m in models if selector == "all" or m.role.split("_")[0] == selector]


def _list(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _done_after(action: Callable[[], None]) -> Job[Done]:
    def job() -> Done:
        action()
        return Done()

    return job
