"""Phase one of an update: new weights wait in the shadow while decoding goes on.

A rank votes by answering the ``SealCall``. The front end commits if every rank of every replica
voted in time, and drops the update otherwise. No rank waits for another rank, neither in its loop
nor in its staging thread. A dead or hanging rank fails the update and nothing else.

The shadow's states allow these steps:

    step      EMPTY    OPEN      SEALED
    open      OPEN     refused   refused
    stage     refused  OPEN      refused
    seal      refused  OPEN      refused
    voted     refused  SEALED    refused
    commit    refused  refused   EMPTY
    drop      EMPTY    EMPTY     EMPTY

EMPTY: the previous version, or nothing of use. OPEN: an update as far as it is filled. SEALED: a
complete and checked update with this rank's vote.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang_inflight.messages import (
    A,
    DistributedSource,
    Done,
    DropCall,
    GiveUpTransferCall,
    InflightCall,
    JoinGroupCall,
    LeaveGroupCall,
    OpenCall,
    Opened,
    SealCall,
    StageCall,
    Staged,
    TimedCall,
    TransferGivenUp,
    has_custom_loader,
)
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.collectives import is_true_on_any_rank
from sglang_inflight.scheduler.groups.groups import Groups
from sglang_inflight.scheduler.update.jobs import Jobs
from sglang_inflight.scheduler.update.live_machine import (
    Drop,
    ForgetPrevious,
    Hollow,
    NotWritten,
    Open,
    ReadDigest,
    Torn,
)
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.update import Names, Sealed, Update
from sglang_inflight.scheduler.update.worker import Job, Worker
from sglang_inflight.vocabulary.answers import Capabilities, StagedChanges, StagingStatus
from sglang_inflight.vocabulary.errors import Conflict, Refused


class StagingState(enum.Enum):
    EMPTY = "empty"
    OPEN = "open"
    SEALED = "sealed"


class Step(enum.Enum):
    OPEN = "open"
    STAGE = "stage"
    SEAL = "seal"
    # the staging thread's own step, at the end of the seal's job
    VOTED = "voted"
    COMMIT = "commit"
    DROP = "drop"


# a step not listed here is refused
MOVES: dict[tuple[Step, StagingState], StagingState] = {
    (Step.OPEN, StagingState.EMPTY): StagingState.OPEN,
    (Step.STAGE, StagingState.OPEN): StagingState.OPEN,
    (Step.SEAL, StagingState.OPEN): StagingState.OPEN,
    (Step.VOTED, StagingState.OPEN): StagingState.SEALED,
    (Step.COMMIT, StagingState.SEALED): StagingState.EMPTY,
    (Step.DROP, StagingState.EMPTY): StagingState.EMPTY,
    (Step.DROP, StagingState.OPEN): StagingState.EMPTY,
    (Step.DROP, StagingState.SEALED): StagingState.EMPTY,
}


def states_for(step: Step) -> list[StagingState]:
    """Return the states that allow ``step``."""
    return [state for known, state in MOVES if known is step]


# why updates are written in place although the model could be staged
AS_SET = "SGLANG_INFLIGHT_STAGING=off, or no memory for a second copy of the weights"


class Staging:
    """The open update of one rank. Only the scheduler's thread touches this object.

    The table above lists the calls allowed in each state. An allowed call becomes a job for
    the staging thread. A drop sets a mark, and the running job looks at the mark.

    In the mode ``off`` there is no shadow: jobs run at once and write the live weights. From the
    first write until a commit the weights are dirty, and the loop makes no step. If no commit
    comes, the weights stay dirty. An update whose changes outgrew their memory is written in place,
    too, by the staging thread, while this object holds the loop.
    """

    def __init__(
        self,
        jobs: Jobs,
        worker: Worker,
        groups: Groups,
        live: LiveWeights,
        answers: AnswerChannel,
        *,
        mode: StagingMode,
        kv_tokens: dict[str, int],
        can: Capabilities,
        expect_no_step: Callable[[], None],
        prepare_to_hold: Callable[[], None],
        post_ahead: Callable[[DistributedSource], None],
    ) -> None:
        self._jobs = jobs
        self._worker = worker
        self._groups = groups
        self._live = live
        self._answers = answers
        self._expect_no_step = expect_no_step
        self._prepare_to_hold = prepare_to_hold
        self._post_ahead = post_ahead
        # True while a custom weight loader runs; read by the staging thread
        self.holds_the_loop = False
        self.mode = mode
        self.kv_tokens = kv_tokens
        self.can = can
        # why every update is refused, or None
        self.refusal = can.in_place if mode is StagingMode.OFF else can.stage
        self._update: Update | None = None
        # the last committed update's
        self._staged_as: StagedChanges | None = None
        # tensors that the last session compared by names brought, by role
        self._names: Names = {}

    @property
    def state(self) -> StagingState:
        if self._update is None:
            return StagingState.EMPTY
        return StagingState.OPEN if self._update.sealed is None else StagingState.SEALED

    # ---- calls -------------------------------------------------------------------

    def open(self, call: OpenCall, *, current_version: str) -> None:
        with self._dirty_together():
            self._open(call, current_version)

    def _open(self, call: OpenCall, current_version: str) -> None:
        if self.refusal is not None:
            raise Refused(self.refusal)
        if self.state not in states_for(Step.OPEN):
            raise Conflict("another weight update is open: end or abort it first")
        if call.expected_version is not None and call.expected_version != current_version:
            raise Conflict(
                f"expected_version is {call.expected_version!r}, but {current_version!r} is serving"
            )
        if (why := self._live.why_not(Open(call.partial))) is not None:
            raise Refused(why)
        live = self._live.contents
        hollow = live if isinstance(live, Hollow) else None
        if call.as_before and hollow is None and (self.mode is StagingMode.OFF or call.in_place):
            raise Refused(
                "SGLANG_INFLIGHT_SESSIONS=as_before needs staged updates, and this one would be "
                "written in place: a refused session would leave half of itself in the weights. "
                "Set SGLANG_INFLIGHT_SESSIONS=whole, or begin the session with partial=true"
            )
        update = self._update = Update(
            call,
            base_version=current_version,
            fills_hollow=hollow is not None,
            marks=hollow is not None and not hollow.is_marked,
            kept=hollow.kept if hollow is not None else frozenset(),
            mends=live.roles if isinstance(live, Torn) else frozenset(),
            needs=self._names if call.as_before else None,
            live_digest=self._live.digest,
        )
        self._live.move(Open(call.partial))
        launched = self._live.launched()

        def prepare() -> Opened:
            return self._jobs.prepare(
                update, call.selector, after=launched, proves_again=call.proves_again
            )

        self._submit(update, call, prepare)

    def stage(self, call: StageCall) -> None:
        self._jobs.reader.layouts.take_in(call.source)
        with self._dirty_together():
            update = self._expect(call.update_id, Step.STAGE)
            if update.in_place:
                self._hold_for(update)

            def job() -> Staged:
                return self._jobs.fill(update, call.source, call.selector, call.digests)

            if isinstance(call.source, DistributedSource):
                self._submit_receiving(update, call, call.source, job)
            elif has_custom_loader(call.source):
                self._submit_and_wait(update, call, job)
            else:
                self._submit(update, call, job)

    def _hold_for(self, update: Update) -> None:
        """Hold the loop from here on, because the staging thread will write the live weights.

        All ranks of a replica take this call in at the same boundary. No forward runs any more, on
        a device neither: the result in flight is processed here. ``update.roles`` are known: the
        front end sent the call after the answer to its ``OpenCall``.
        """
        self._prepare_to_hold()
        self._live.announce_write(update.roles)

    def seal(self, call: SealCall) -> None:
        with self._dirty_together():
            update = self._expect(call.update_id, Step.SEAL)
            digest = self._live.digest
            self._submit(update, call, lambda: self._jobs.seal(update, digest))

    def drop(self, call: DropCall) -> None:
        """Forget an update. An unknown update is no error."""
        update = self._update
        if update is not None and update.id == call.update_id:
            update.dropped = call.reason
            self._update = None
            self._live.move(Drop())
        stopped = threading.Event()

        def stop() -> None:
            self._jobs.drop()
            stopped.set()

        # answered after the running job, when the sender's memory is released
        self._worker.submit(call, _done_after(stop))
        if update is not None and update.id == call.update_id and update.in_place:
            self._serve_if_unwritten(stopped)

    def _serve_if_unwritten(self, stopped: threading.Event) -> None:
        """Let the loop go on if a dropped update in place wrote nothing on any rank.

        All ranks of a replica drop it at the same boundary. No step can be made meanwhile, so the
        loop waits for the running job here. A job that does not end counts as one that wrote.
        """
        live = self._live.contents
        is_clean = isinstance(live, Torn) and live.is_announced
        is_written = not is_clean or not stopped.wait(_STOP_S) or self._jobs.has_written()
        if not is_true_on_any_rank(is_written):
            self._live.move(NotWritten())

    def may_have_written_by_handles(self, update_id: str) -> bool:
        """Return whether a client of this open update may have written the weights over RDMA.

        Such a client of SGLang's sends no tensor and only ends the session.
        """
        update = self._update
        if update is None or update.id != update_id:
            return False
        return update.may_be_empty and not update.tensors

    def take(self, update_id: str) -> Sealed:
        """Return the sealed update for its commit, and forget it."""
        update = self._expect(update_id, Step.COMMIT)
        assert update.sealed is not None
        self._update = None
        # the seal computes the live digest if it is unknown; a dropped update's is not kept
        if update.base_digest is not None:
            self._live.move(ReadDigest(update.base_digest))
        self._staged_as = update.sealed.staged_as
        if update.needs is not None:
            self._names = {**self._names, **update.sealed.names}
        return update.sealed

    def join_group(self, call: JoinGroupCall) -> None:
        """Begin a rendezvous. The rendezvous' own thread answers, and no update waits behind it."""
        self._groups.join(call, self._answers)

    def leave_group(self, call: LeaveGroupCall) -> None:
        name, join_id = call.group_name, call.join_id
        self._groups.stop_joining(name, "the group was left", join_id)
        # after the running job, which may still receive in this group
        self._worker.submit(call, _done_after(lambda: self._groups.leave(name, join_id)))

    def give_up_transfer(self, call: GiveUpTransferCall) -> None:
        def job() -> TransferGivenUp:
            return TransferGivenUp(broken=self._groups.give_up(call))

        # after the running job, which may still receive this transfer
        self._worker.submit(call, job)

    def when_idle(self, call: InflightCall[A], job: Job[A]) -> None:
        """Run a job of no update after all earlier jobs; the staging thread answers.

        The job may copy the served weights, or the caller release them.
        """

        def run() -> A:
            self._jobs.stop_proving()
            return job()

        self._worker.submit(call, run)

    def note_commit(self, *, rolls_back: bool) -> None:
        """Note that other weights are served from now on."""
        self._jobs.note_commit(rolls_back=rolls_back)

    def forget_shadows(self) -> None:
        """Free the shadows, and the previous version with them, after the device's last swap.

        Call only while no update is open and the staging thread is idle.
        """
        self._live.move(ForgetPrevious())
        self._live.free_given_up(wait=True)
        self._jobs.forget_shadows()

    @property
    def why_not_filled(self) -> str | None:
        """Return why several updates cannot fill weights without contents, or None if they can."""
        return self.can.stage or self._jobs.why_not_filled

    def why_no_rollback(self) -> str | None:
        """Return why the shadow does not hold the previous version, or None if it does."""
        if self.mode is StagingMode.OFF:
            return f"updates are written in place ({self.can.stage or AS_SET})"
        if self.state is not StagingState.EMPTY:
            return "an update is being staged over it"
        if self._live.reachable is None:
            return (
                "nothing was committed since the start, the last failed update, the last update "
                "written in place, or the last release of memory"
            )
        return None

    def describe(self) -> StagingStatus:
        update = self._update
        return StagingStatus(
            mode=self.mode.name.lower(),
            state=self.state.value,
            update_id=update.id if update else None,
            tensors=update.tensors if update else 0,
            bytes=update.bytes if update else 0,
            can_roll_back=self.why_no_rollback() is None,
            dirty=self._live.dirty,
            refusal=self.refusal,
            groups=self._groups.describe(),
            kv_tokens=self.kv_tokens,
            staged_as=self._staged_as,
            proof=self._jobs.proof,
            ways=self._jobs.ways,
        )

    def _expect(self, update_id: str, step: Step) -> Update:
        update = self._update
        if update is None or update.id != update_id or self.state not in states_for(step):
            expected = " or ".join(state.value for state in states_for(step))
            raise Conflict(f"no weight update {update_id!r} is {expected}")
        return update

    def _submit(self, update: Update, call: TimedCall[A], job: Job[A]) -> None:
        self._worker.submit(call, self._of_update(update, call, job))

    def _of_update(self, update: Update, call: TimedCall[A], job: Job[A]) -> Job[A]:
        def one_failure_fails_the_update() -> A:
            try:
                update.allow(call.timeout_s)
                update.check()
                return job()
            except BaseException as error:
                update.failed = update.failed or str(error) or repr(error)
                raise

        return one_failure_fails_the_update

    def _submit_receiving(
        self, update: Update, call: StageCall, source: DistributedSource, job: Job[Staged]
    ) -> None:
        """Post the first broadcasts here, on the loop's thread; ``job`` receives them."""
        of_update = self._of_update(update, call, job)

        def receive() -> Staged:
            try:
                return of_update()
            finally:
                self._groups.end_transfer(source)

        self._post_ahead(source)
        self._worker.submit(call, receive)

    def _submit_and_wait(self, update: Update, call: TimedCall[A], job: Job[A]) -> None:
        """Run ``job`` on the staging thread while this rank makes no step.

        A custom weight loader may change state of the whole process, such as
        ``torch.Tensor.copy_`` (verl's does). A step beside the loader would compute with the
        change. All ranks of a replica take this call in at the same boundary, and none of their
        jobs waits for a step. So no rank waits for another rank. The loop goes on when the job has
        ended or its time is over. The update is lost after a timeout.
        """
        ended = threading.Event()
        of_update = self._of_update(update, call, job)

        def run_and_signal() -> A:
            try:
                return of_update()
            finally:
                ended.set()

        self._expect_no_step()
        self.holds_the_loop = True
        try:
            self._worker.submit(call, run_and_signal)
            ended.wait(call.timeout_s)
        finally:
            self.holds_the_loop = False

    @contextmanager
    def _dirty_together(self) -> Iterator[None]:
        """Mark this rank dirty after a call if a rank of its replica is dirty.

        A dirty rank makes no step, and a clean rank would wait for it in the next collective.
        """
        try:
            yield
        finally:
            is_dirty = self._live.dirty is not None
            if self.mode is StagingMode.OFF and is_true_on_any_rank(is_dirty) and not is_dirty:
                self._live.write_in_place(self._update.roles if self._update else ())


# a job looks at the drop between two tensors
_STOP_S = 5.0


def _done_after(action: Callable[[], None]) -> Job[Done]:
    def job() -> Done:
        action()
        return Done()

    return job
