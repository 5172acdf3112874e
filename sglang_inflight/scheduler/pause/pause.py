"""Pause states, and the one object that moves between them.

    state       the loop                              moves to
    RUNNING     runs                                  FROZEN (in_place, retract)
                                                      DRAINING (abort, wait)
    DRAINING    runs; admits nothing new              FROZEN when nothing runs any more,
                                                      or when "wait" has taken too long
                                                      RUNNING (continue)
    FROZEN      sleeps until a message comes          RUNNING (continue)
                                                      DRAINING (abort, wait)
                                                      FROZEN (in_place, retract)

Every rank of a replica moves at the same boundary: all see the same messages in the same
pass of their loops, and agree on what messages do not tell (``agreement.py``): which times
have run out, and whether anything still runs.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
)

from sglang_inflight.errors import Conflict
from sglang_inflight.messages import ContinueCall, PauseCall, Paused, PauseMode, Resumed
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.collectives import as_first_rank_says, is_true_of_any
from sglang_inflight.scheduler.metrics import Metrics
from sglang_inflight.scheduler.pause.sleeper import Sleeper
from sglang_inflight.status import Holder, PauseStatus

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

# How often, at most, the load is published while frozen. It takes a walk over the queue.
LOAD_REFRESH_S = 0.05


def _after(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds


class PauseState(enum.Enum):
    RUNNING = "running"
    DRAINING = "draining"
    FROZEN = "frozen"


@dataclass
class _Holder:
    mode: PauseMode
    # time.monotonic() when the lease runs out; None: never
    expires_at: float | None


@dataclass
class _Grant:
    """A pause that is not answered yet, because the loop still drains."""

    call: PauseCall
    aborted: int
    # time.monotonic() when "wait" gives up waiting
    gives_up_at: float | None


class Pause:
    """The pause state of one scheduler. Only the scheduler's thread touches it."""

    def __init__(
        self, scheduler: Scheduler, boundary: Boundary, answers: AnswerChannel, metrics: Metrics
    ) -> None:
        self._scheduler = scheduler
        self._boundary = boundary
        self._answers = answers
        self._metrics = metrics
        self._sleeper = Sleeper(scheduler)
        self._holders: dict[str, _Holder] = {}
        self._grants: list[_Grant] = []
        self._may_run: set[Req] = set()
        self._frozen_at: float | None = None
        # time.monotonic() before which the load is not published again
        self._publishes_at = 0.0
        self._state = PauseState.RUNNING

    @property
    def state(self) -> PauseState:
        return self._state

    @property
    def mode(self) -> PauseMode | None:
        """The mode asked for last among the pauses held."""
        return next(reversed(self._holders.values())).mode if self._holders else None

    # ---- calls -------------------------------------------------------------------

    def pause(self, call: PauseCall) -> None:
        """Take or renew a pause; answered here, or at the boundary where draining ends."""
        assert call.mode is not None
        freezes_now = call.mode in ("in_place", "retract")
        # those that drain as well are granted together, when nothing runs any more
        self._withdraw_grants(
            f"a pause of mode {call.mode} took its place",
            which=lambda grant: freezes_now or grant.call.pause_id == call.pause_id,
        )
        # re-inserted, because the last one asked for decides the mode
        self._holders.pop(call.pause_id, None)
        self._holders[call.pause_id] = _Holder(call.mode, _after(call.lease_s))
        if call.mode == "abort":
            self._drain_by(call, aborted=self._abort_all(), gives_up_at=None)
        elif call.mode == "wait":
            self._drain_by(call, aborted=0, gives_up_at=_after(call.timeout_s))
        else:
            retracted = self._boundary.retract() if call.mode == "retract" else 0
            self._freeze()
            self._answer(call, retracted=retracted)

    def wait_unless_frozen(self, call: PauseCall) -> None:
        """Take a pause that lets running requests end, but where nothing runs anyhow take none."""
        if self._state is PauseState.FROZEN:
            self._answer(call)
        else:
            self.pause(call)

    def is_held(self, pause_id: str) -> bool:
        return pause_id in self._holders

    def renew(self, call: PauseCall) -> None:
        """Lengthen the lease, and change the mode where it is another one.

        Raises ``Conflict`` where the pause is not held any more.
        """
        holder = self._holders.get(call.pause_id)
        if holder is None:
            raise Conflict(f"pause_id {call.pause_id!r} is not held: it was let go or ran out")
        call.mode = call.mode or holder.mode
        if self._state is PauseState.FROZEN and call.mode == holder.mode:
            # what a "wait" left frozen must not run again
            holder.expires_at = _after(call.lease_s)
            self._answer(call)
        else:
            self.pause(call)

    def resume(self, call: ContinueCall) -> None:
        """Let go of one pause, or of all; run on when none is left."""
        if call.pause_id is None:
            self._holders.clear()
        elif not self._let_go(call.pause_id):
            raise Conflict(f"pause_id {call.pause_id!r} is not held: it was let go or ran out")
        if not self._holders:
            self._thaw(torch_empty_cache=call.torch_empty_cache)
        self._answers.succeed(call, Resumed(paused=self._state is not PauseState.RUNNING))

    # ---- the event loop ----------------------------------------------------------

    def holds_the_loop(self) -> bool:
        """Called at every boundary, after the messages: may the next step not run?"""
        self._look_at_the_clock()
        if self._state is PauseState.RUNNING:
            return False
        if self._state is PauseState.DRAINING:
            if self._still_drains():
                return False
            self._freeze_drained()
        self._scheduler._record_scheduler_state_for_paused_engine()
        self._publish_load()
        # a step's result answers the health checks that came in meanwhile; here is no step
        self._scheduler.maybe_send_health_check_signal()
        self.sleep()
        return True

    def _publish_load(self) -> None:
        """A step's result does it, or idling; here is neither, and routers read it."""
        now = time.monotonic()
        if now < self._publishes_at:
            return
        self._publishes_at = now + LOAD_REFRESH_S
        scheduler = self._scheduler
        snapshot = scheduler.publish_load_snapshot(force=True)
        scheduler.load_publisher.publish_load_stat(
            scheduler.load_inquirer.get_loads, force=True, snapshot=snapshot
        )

    def sleep(self) -> None:
        """Until a message comes or a lease runs out."""
        leases = (h.expires_at for h in self._holders.values() if h.expires_at is not None)
        self._sleeper.sleep(min(leases, default=None))

    def admits(self, req: Req) -> bool:
        """While draining, run only what already ran, or was aborted and must be ended."""
        return req in self._may_run or req.to_finish is not None

    def describe(self) -> PauseStatus:
        """State, mode, holders with seconds left, and how many requests run and wait."""
        now = time.monotonic()
        return PauseStatus(
            state=self._state.value,
            paused=self._state is not PauseState.RUNNING,
            mode=self.mode,
            holders=tuple(
                Holder(
                    pause_id=pause_id,
                    mode=holder.mode,
                    lease_left_s=None
                    if holder.expires_at is None
                    else max(0.0, holder.expires_at - now),
                )
                for pause_id, holder in self._holders.items()
            ),
            running=len(self._boundary.running_requests()),
            waiting=len(self._boundary.waiting_requests()),
        )

    # ---- moves -------------------------------------------------------------------

    def _look_at_the_clock(self) -> None:
        """All ranks have the same times to look at, and the first one's clock counts."""
        leases = [("lease", pause_id, h.expires_at) for pause_id, h in self._holders.items()]
        waits = [("wait", grant.call.pause_id, grant.gives_up_at) for grant in self._grants]
        ends = [(what, id, at) for what, id, at in leases + waits if at is not None]
        if not ends:
            return
        now = time.monotonic()
        over = as_first_rank_says([(what, id) for what, id, at in ends if at <= now])
        for what, pause_id in over:
            if what == "lease":
                self._end_lease(pause_id)
            else:
                self._end_waiting(pause_id)

    def _end_lease(self, pause_id: str) -> None:
        self._let_go(pause_id)
        logger.warning("The lease of pause %s ran out.", pause_id)
        if not self._holders:
            logger.warning("Nobody holds a pause any more: generation continues.")
            self._thaw(torch_empty_cache=False)
            self._answers.tell_that_generation_continues()

    def _end_waiting(self, pause_id: str) -> None:
        # a lease that ran out in the same pass may have taken the grant along
        if any(grant.call.pause_id == pause_id for grant in self._grants):
            self._withdraw_grants(
                "the timeout_s of another one ended the waiting",
                which=lambda grant: grant.call.pause_id != pause_id,
            )
            self._freeze_drained()

    def _drain_by(self, call: PauseCall, *, aborted: int, gives_up_at: float | None) -> None:
        self._grants.append(_Grant(call, aborted, gives_up_at))
        self._may_run = self._boundary.running_requests()
        self._unfreeze(torch_empty_cache=False)
        self._state = PauseState.DRAINING

    def _abort_all(self) -> int:
        self._boundary.drain()
        aborted = len(self._boundary.running_requests()) + len(self._boundary.waiting_requests())
        self._scheduler.abort_request(AbortReq(abort_all=True))
        return aborted

    def _still_drains(self) -> bool:
        return is_true_of_any(
            bool(self._boundary.running_requests())
            or bool(self._boundary.pending_batches)
            or self._scheduler.chunked_req is not None
            or any(self.admits(req) for req in self._boundary.waiting_requests())
        )

    def _freeze_drained(self) -> None:
        granted, self._grants = self._grants, []
        self._freeze()
        for grant in granted:
            self._answer(grant.call, aborted=grant.aborted)

    def _freeze(self) -> None:
        self._boundary.drain()
        self._scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))
        # the watchdog takes a batch that makes no step for a hang
        self._scheduler.cur_batch_for_debug = None
        self._may_run = set()
        if self._frozen_at is None:
            self._frozen_at = time.perf_counter()
            self._metrics.paused.set(1)
        self._state = PauseState.FROZEN

    def _unfreeze(self, *, torch_empty_cache: bool) -> None:
        if self._frozen_at is None:
            return
        seconds = time.perf_counter() - self._frozen_at
        self._forgive(seconds)
        self._frozen_at = None
        self._metrics.paused.set(0)
        self._metrics.paused_seconds.inc(seconds)
        self._scheduler.continue_generation(
            ContinueGenerationReqInput(torch_empty_cache=torch_empty_cache)
        )

    def _thaw(self, *, torch_empty_cache: bool) -> None:
        self._withdraw_grants("generation was continued before it was granted")
        self._unfreeze(torch_empty_cache=torch_empty_cache)
        self._may_run = set()
        self._state = PauseState.RUNNING

    def _forgive(self, seconds: float) -> None:
        """Time spent paused does not count against a request's time limits."""
        for req in self._boundary.live_requests():
            stats = req.time_stats
            if stats.wait_queue_entry_time > 0:
                stats.wait_queue_entry_time += seconds
            if stats.forward_entry_time > 0:
                stats.forward_entry_time += seconds

    def _let_go(self, pause_id: str) -> bool:
        """Forget one holder; False where it holds nothing."""
        if self._holders.pop(pause_id, None) is None:
            return False
        self._withdraw_grants(
            "it was let go before it was granted",
            which=lambda grant: grant.call.pause_id == pause_id,
        )
        if self._state is PauseState.DRAINING and self._holders and not self._grants:
            # nobody asked for this draining but the one who left
            self._freeze()
        return True

    def _withdraw_grants(
        self, why: str, *, which: Callable[[_Grant], bool] = lambda grant: True
    ) -> None:
        """Refuse pauses that are not granted yet: their callers then hold nothing."""
        withdrawn = [grant for grant in self._grants if which(grant)]
        self._grants = [grant for grant in self._grants if not which(grant)]
        for grant in withdrawn:
            self._holders.pop(grant.call.pause_id, None)
            self._answers.fail(grant.call, Conflict(f"The pause was not granted: {why}."))

    def _answer(self, call: PauseCall, *, retracted: int = 0, aborted: int = 0) -> None:
        answer = Paused(
            mode=self.mode,
            running=len(self._boundary.running_requests()),
            waiting=len(self._boundary.waiting_requests()),
            retracted=retracted,
            aborted=aborted,
        )
        self._answers.succeed(call, answer)
