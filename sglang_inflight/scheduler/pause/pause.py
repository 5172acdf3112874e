"""Carries out the pause machine's moves and replies on a scheduler.

``machine.py`` has the states and events. Every rank of a replica moves at the same boundary,
because all see the same messages in the same pass of their loops. Messages do not tell which
leases have expired, nor whether a request still runs: on these the ranks agree by a collective
(``collectives.py``).

A loop without steps sleeps until a message or an alarm.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, assert_never

import zmq
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
)

from sglang_inflight.joints import Joint
from sglang_inflight.messages import (
    ContinueCall,
    PauseCall,
    Paused,
    PauseMode,
    Resumed,
    TimesOver,
)
from sglang_inflight.metrics import Metrics
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.collectives import broadcast_from_first_rank, is_true_on_any_rank
from sglang_inflight.scheduler.pause.machine import (
    DRAINING_MODES,
    AbortAll,
    Asked,
    Continued,
    Drain,
    Drained,
    Event,
    Freeze,
    Grant,
    HeldPauses,
    LeaseExpired,
    LeaseOver,
    MemoryAway,
    MemoryBack,
    Move,
    NotifyGenerationContinues,
    NotifyNewRequests,
    PauseState,
    Refuse,
    Released,
    Reply,
    Retract,
    RunOn,
    WaitOver,
    transition,
)
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.vocabulary.answers import Holder, PauseStatus
from sglang_inflight.vocabulary.errors import Conflict

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_inflight.scheduler.requests import Requests
    from sglang_inflight.sglang_types import Scheduler

logger = logging.getLogger(__name__)

# Shortest time between two publications of the load while frozen. Each one walks the queue.
LOAD_REFRESH_S = 0.05
# Longest sleep of a loop. The other ranks wait in a gloo broadcast meanwhile, and its time
# limit is minutes.
LONGEST_SLEEP_S = 1.0
# Under attention DP several ranks have a socket, and a sleeping rank delays the others.
LONGEST_SLEEP_IN_STEP_S = 0.005


class FrozenWork(Protocol):
    """Work that goes on while a loop is frozen. Only the scheduler's thread calls it."""

    @property
    def draining_modes(self) -> tuple[PauseMode, ...]:
        """Modes that drain on this server, besides those that drain everywhere."""

    def do(self) -> None:
        """Do what is due. Called on all ranks in each frozen pass."""

    @property
    def next_time(self) -> float | None:
        """Time of ``time.monotonic()`` at which the loop must not sleep; None without work."""

    def extend_request_timeouts(self, seconds: float) -> None:
        """Extend the timeouts of the work by the ``seconds`` for which the loop was frozen."""


# makes the work that goes on while a scheduler's loop is frozen
FROZEN: Joint[Callable[[Scheduler, Requests], FrozenWork]] = Joint("frozen loop")


class Pause:
    """The pauses of one scheduler. Only the scheduler's thread touches it."""

    def __init__(
        self, scheduler: Scheduler, boundary: Boundary, answers: AnswerChannel, metrics: Metrics
    ) -> None:
        self._scheduler = scheduler
        self._boundary = boundary
        self._requests = boundary.requests
        self._answers = answers
        self._metrics = metrics
        self._sleeper = Sleeper(scheduler)
        self._frozen_work = [make(scheduler, boundary.requests) for make in FROZEN]
        self._held = HeldPauses()
        # number of events so far; a TimesOver message is void if it has changed since
        self._seen = 0
        # while draining: requests that had begun before the drain
        self._may_run: set[Req] = set()
        # some of these, aborted between two servers: only a running loop releases them
        self._ending: set[Req] = set()
        # number of aborted requests by the id of the aborting call, until the call is answered
        self._aborted: dict[str, int] = {}
        # number of requests retracted by the current event
        self._retracted = 0
        self._frozen_at: float | None = None
        # time.monotonic() before which the load is not published again
        self._publishes_at = 0.0

    @property
    def state(self) -> PauseState:
        return self._held.state

    @property
    def mode(self) -> PauseMode | None:
        """Mode of the latest pause held."""
        return self._held.mode

    @property
    def rejects(self) -> bool:
        """Whether a held pause rejects new requests."""
        return self._held.new_requests == "reject"

    # ---- calls -------------------------------------------------------------------

    def ask(self, call: PauseCall) -> None:
        """Take or renew a pause. A draining pause is answered when its drain ends."""
        more = (mode for work in self._frozen_work for mode in work.draining_modes)
        self._make_transition(Asked(call, time.monotonic(), (*DRAINING_MODES, *more)))

    def resume(self, call: ContinueCall) -> None:
        """Release one pause, or all. The loop runs on when none is left."""
        self._make_transition(Continued(call))

    def end_times(self, over: TimesOver) -> None:
        """End the leases and waits that expired on a pipeline's first rank.

        Do nothing if another event came after the first rank looked.
        """
        if over.seen != self._seen:
            return
        for pause_id in over.leases:
            self._make_transition(LeaseOver(pause_id))
        for pause_id in over.waits:
            self._make_transition(WaitOver(pause_id, time.monotonic()))

    # ---- released memory -----------------------------------------------------------

    def hold_for_memory(self, why: str) -> None:
        """Make no step until ``memory_is_back``, even when all other pauses are released."""
        self._make_transition(MemoryAway(why))

    def memory_is_back(self) -> None:
        """Run on, unless somebody else holds a pause."""
        self._make_transition(MemoryBack())

    # ---- the event loop ----------------------------------------------------------

    def holds_the_loop(self) -> bool:
        """Return whether the loop must skip this step, after sleeping until a message comes.

        Called at every boundary, after the messages were handled.
        """
        self._check_the_clock()
        if self.state is PauseState.RUNNING:
            return False
        if self.state is PauseState.DRAINING:
            if self._still_drains():
                return False
            self._make_transition(Drained(time.monotonic()))
        self.report_alive()
        for work in self._frozen_work:
            work.do()
        self.sleep()
        return True

    def report_alive(self) -> None:
        """Report to metrics, routers and health checks, as a step's result would."""
        self._scheduler._record_scheduler_state_for_paused_engine()
        self._publish_load()
        self._scheduler.maybe_send_health_check_signal()

    def _publish_load(self) -> None:
        """Publish the load for routers, because neither a step nor the idle loop does."""
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
        """Sleep until a message comes, a lease or wait expires, or work is due."""
        alarms = [at for at, _ in self._held.alarms]
        alarms += [at for work in self._frozen_work if (at := work.next_time) is not None]
        self._sleeper.sleep(min(alarms, default=None))

    def admits(self, req: Req) -> bool:
        """Return whether ``req`` may run during a drain: it had begun, or was aborted."""
        return req in self._may_run or req.to_finish is not None

    def describe(self) -> PauseStatus:
        """Return state, mode, holders with seconds left, and the numbers of requests."""
        now = time.monotonic()
        # a waiting call has its whole lease left: leases begin with the grant
        leases = {each.call.pause_id: each.call.lease_s for each in self._held.waiting}
        return PauseStatus(
            state=self.state.value,
            paused=self.state is not PauseState.RUNNING,
            mode=self.mode,
            holders=tuple(
                Holder(
                    pause_id=holder.pause_id,
                    mode=holder.mode,
                    lease_left_s=leases.get(holder.pause_id)
                    if holder.expires_at is None
                    else max(0.0, holder.expires_at - now),
                    new_requests=holder.new_requests,
                )
                for holder in self._held.holders
            ),
            new_requests=self._held.new_requests,
            running=len(self._requests.running()),
            waiting=len(self._requests.waiting()),
        )

    # ---- the machine ---------------------------------------------------------------

    def times_over(self) -> list[TimesOver]:
        """Return the expired leases and waits, for a pipeline's first rank to send.

        The first rank sends its message in every turn until it takes the message in.
        """
        events = self._expired() if get_parallel().pp_size > 1 else []
        if not events:
            return []
        leases = [event.pause_id for event in events if isinstance(event, LeaseOver)]
        waits = [event.pause_id for event in events if isinstance(event, WaitOver)]
        return [TimesOver(leases=leases, waits=waits, seen=self._seen)]

    def _check_the_clock(self) -> None:
        """End the leases and waits that expired by the first rank's clock.

        All ranks hold the same leases and waits. A pipeline's stages do not reach the same turn
        at the same time, so they get a message instead (``times_over``).
        """
        if self._held.alarms and get_parallel().pp_size == 1:
            for event in broadcast_from_first_rank(self._expired()):
                if isinstance(event, WaitOver):
                    # the first rank may be on another machine, with another clock
                    event = replace(event, now=time.monotonic())
                self._make_transition(event)

    def _expired(self) -> list[LeaseOver | WaitOver]:
        now = time.monotonic()
        return [event for at, event in self._held.alarms if at <= now]

    def _make_transition(self, event: Event) -> None:
        """Make the transition of ``event``.

        If a move raises, the pauses stay as they were, and no call is answered.
        """
        self._seen += 1
        held, moves, replies = transition(self._held, event)
        self._retracted = 0
        for move in moves:
            self._make(move)
        self._held = held
        for reply in replies:
            self._send_reply(reply)

    def _make(self, move: Move) -> None:
        match move:
            case Retract():
                self._retracted = self._boundary.retract()
            case AbortAll(call):
                self._aborted[call.call_id] = self._abort_all()
            case Freeze():
                self._freeze()
            case Drain():
                self._end_freeze(torch_empty_cache=False)
                self._may_run = self._requests.begun() | self._ending
            case RunOn(torch_empty_cache):
                self._end_freeze(torch_empty_cache=torch_empty_cache)
                self._may_run = self._ending = set()
            case _:
                assert_never(move)

    def _send_reply(self, reply: Reply) -> None:
        match reply:
            case Grant(call):
                aborted = self._aborted.pop(call.call_id, 0)
                answer = Paused(
                    mode=self.mode,
                    running=len(self._requests.running()),
                    waiting=len(self._requests.waiting()),
                    retracted=self._retracted,
                    aborted=aborted,
                    rejects=self.rejects,
                )
                self._answers.succeed(call, answer)
            case Released(released):
                paused = self.state is not PauseState.RUNNING
                self._answers.succeed(released, Resumed(paused=paused, rejects=self.rejects))
            case Refuse(refused, why):
                self._aborted.pop(refused.call_id, None)
                self._answers.fail(refused, Conflict(why))
            case LeaseExpired(pause_id):
                logger.warning("The lease of pause %s ran out.", pause_id)
            case NotifyGenerationContinues():
                logger.warning("Nobody holds a pause any more: generation continues.")
                self._answers.send_generation_continues()
            case NotifyNewRequests():
                self._answers.send_generation_continues()
            case _:
                assert_never(reply)

    # ---- moves ---------------------------------------------------------------------

    def _abort_all(self) -> int:
        self._boundary.drain()
        waiting = {
            *self._requests.waiting(),
            *self._requests.between_servers(),
        }
        aborted = len(self._requests.running() | waiting)
        self._scheduler.abort_request(AbortReq(abort_all=True))
        self._ending = set(self._requests.between_servers())
        return aborted

    def _still_drains(self) -> bool:
        """Return whether a request still runs, on any rank.

        KV in transfer from another server does not count, because that server may be paused.
        """
        return is_true_on_any_rank(
            bool(self._requests.running())
            or bool(self._requests.pending_batches)
            or self._scheduler.chunked_req is not None
            or any(self.admits(req) for req in self._requests.waiting())
            or any(req in self._ending for req in self._requests.between_servers())
            or self._requests.may_be_written_to
        )

    def _freeze(self) -> None:
        self._boundary.prepare_to_hold()
        # a client that has aborted all requests flushes the cache next
        self._boundary.forget_finished()
        self._scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))
        self._may_run = self._ending = set()
        if self._frozen_at is None:
            self._frozen_at = time.perf_counter()
            self._metrics.paused.set(1)

    def _end_freeze(self, *, torch_empty_cache: bool) -> None:
        if self._frozen_at is None:
            return
        seconds = time.perf_counter() - self._frozen_at
        self.extend_request_timeouts(seconds)
        self._frozen_at = None
        self._metrics.paused.set(0)
        self._metrics.paused_seconds.inc(seconds)
        self._scheduler.continue_generation(
            ContinueGenerationReqInput(torch_empty_cache=torch_empty_cache)
        )

    def extend_request_timeouts(self, seconds: float) -> None:
        """Extend every request's timeouts by ``seconds`` without a step.

        A request that arrived during these seconds gets only the time since its arrival.
        """
        now = time.perf_counter()
        for req in self._requests.live():
            stats = req.time_stats
            if stats.wait_queue_entry_time > 0:
                stats.wait_queue_entry_time = min(stats.wait_queue_entry_time + seconds, now)
            if stats.forward_entry_time > 0:
                stats.forward_entry_time = min(stats.forward_entry_time + seconds, now)
        for work in self._frozen_work:
            work.extend_request_timeouts(seconds)


class Sleeper:
    """Sleeps until a message comes. Only the scheduler's thread calls it."""

    def __init__(self, scheduler: Scheduler) -> None:
        channels = scheduler.ipc_channels
        # Ranks without a socket sleep in the first rank's broadcast instead. SGLang's scripted
        # runtime replaces the socket by a script with a step in every pass: never sleep there.
        self._poller: zmq.Poller | None = None
        if isinstance(channels.recv_from_tokenizer, zmq.Socket):
            self._poller = zmq.Poller()
            self._poller.register(channels.recv_from_tokenizer, zmq.POLLIN)
            self._poller.register(channels.recv_from_rpc, zmq.POLLIN)

    def sleep(self, alarm: float | None) -> None:
        """Sleep until a message comes, or until ``alarm`` of ``time.monotonic()``."""
        if self._poller is None:
            return
        longest = LONGEST_SLEEP_S
        if get_parallel().attn_dp_enabled:
            longest = LONGEST_SLEEP_IN_STEP_S
        if alarm is not None:
            longest = min(longest, alarm - time.monotonic())
        self._poller.poll(int(1000 * max(0.0, longest)))
