"""Decides whether a scheduler's next step may run.

A pause holds the loop, also the pause while memory is released. Weights that cannot be served hold
it, because hollow or partially written weights make wrong tokens. In a pipeline a call that waits
for microbatches in flight holds it too.

This module hooks ``Scheduler.on_idle``, ``is_fully_idle``, ``_collect_inflight_batches`` and
``_poll_timeout_aborts``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import AbortReq

from sglang_inflight.hooking import AROUND, SCHEDULER, hook
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.collectives import CONTROL_SYNC
from sglang_inflight.scheduler.pause.machine import PauseState
from sglang_inflight.scheduler.pause.pause import Pause
from sglang_inflight.scheduler.pause.pipeline_drain import PipelineDrain, SkippedTurns
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.staging import Staging, StagingState
from sglang_inflight.sglang_types import get_parallel

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_inflight.sglang_types import Scheduler


class Hold:
    """Asked at each step boundary. Only the scheduler's thread touches it.

    Requests' timeouts are extended by the time of a hold. A pause extends them itself, so the time
    of unserved weights counts only while no pause is held.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        boundary: Boundary,
        pause: Pause,
        live: LiveWeights,
        staging: Staging,
    ) -> None:
        self._scheduler = scheduler
        self._boundary = boundary
        self._pause = pause
        self._live = live
        self._staging = staging
        self.pipeline_drain = PipelineDrain(boundary.requests)
        self._skipped_turns = SkippedTurns()
        # time.perf_counter() at the first step skipped because the weights cannot be served
        self._weights_since: float | None = None

    @property
    def is_frozen(self) -> bool:
        return self._pause.state is PauseState.FROZEN

    @property
    def is_due(self) -> bool:
        """Whether a pause or the weights will hold the next step."""
        return self.is_frozen or self._live.why_not_served is not None

    @property
    def is_on(self) -> bool:
        """Whether the last step was skipped, because of a pause or of weights not served."""
        return self.is_frozen or self._weights_since is not None

    @property
    def keeps_back_requests(self) -> bool:
        """Whether a pause, a waiting call or an owed turn keeps requests from making steps."""
        return self.is_frozen or self.pipeline_drain.is_waited_for or self._skipped_turns.pending

    def holds_step(self) -> bool:
        """Return whether the loop must skip this step, and sleep until a message comes if so.

        Call it at each step boundary, after the messages were handled.
        """
        why_not = self._live.why_not_served
        if why_not is None or self.is_frozen:
            self._end_weights_hold()
        # requests wait while a pause is held, or while an update is open; otherwise end them
        elif self._staging.state is StagingState.EMPTY:
            self._end_requests(why_not)
        if self._pause.holds_the_loop():
            return True
        if why_not is None:
            return False
        if self._weights_since is None:
            self._weights_since = time.perf_counter()
        self._pause.report_alive()
        self._pause.sleep()
        return True

    @hook(f"{SCHEDULER}._poll_timeout_aborts", AROUND, via="inflight.hold")
    def stop_clocks(self, poll: Callable[[], list[Any]]) -> list[Any]:
        """Time out no request while a pause or an update holds it. Leases still expire."""
        aborts = [] if self.is_on else poll()
        return [*aborts, *self._pause.times_over()]

    @hook(f"{SCHEDULER}.on_idle", AROUND, via="inflight.hold")
    def skip_idle_work(self, idle: Callable[[], None]) -> None:
        """Skip SGLang's idle work while a turn is held or a control call waits.

        A pipeline's loop without a launch counts as idle, and its pools would fail the idle check.
        An idle loop may also sleep until a message comes, before it takes in the waiting call.
        """
        if not self.keeps_back_requests and not CONTROL_SYNC.is_waiting:
            idle()

    @hook(f"{SCHEDULER}._collect_inflight_batches", AROUND, via="inflight.hold")
    def include_held_batches(
        self, collect: Callable[[], list[ScheduleBatch | None]]
    ) -> list[ScheduleBatch | None]:
        """Add parked batches, and the prefilled requests of held microbatches."""
        return [*collect(), *self._held_batches()]

    @hook(f"{SCHEDULER}.is_fully_idle", AROUND, via="inflight.hold")
    def is_idle(self, is_fully_idle: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        """Return False for a health check while the loop is held, so that it waits for no forward.

        Also return False while a pipeline owes a turn to prefilled requests.
        """
        if kwargs.get("for_health_check") and self.is_on:
            return False
        if any(not req.finished() for batch in self._held_batches() for req in batch.reqs):
            return False
        return is_fully_idle(*args, **kwargs)

    def _held_batches(self) -> list[ScheduleBatch]:
        return [*self._boundary.requests.parked_batches, *self._held_microbatches()]

    def _held_microbatches(self) -> list[ScheduleBatch]:
        if get_parallel().pp_size == 1 or not self.keeps_back_requests:
            return []
        return [batch for batch in self._scheduler.last_mbs if batch is not None]

    def count_turn(self, *, held: bool) -> None:
        """Count a pipeline's turn, which launches nothing if ``held``."""
        self._skipped_turns.begin(held=held, microbatches=len(self._scheduler.running_mbs))

    def _end_weights_hold(self) -> None:
        """Extend request timeouts by the time for which the weights held the loop."""
        if self._weights_since is not None:
            self._pause.extend_request_timeouts(time.perf_counter() - self._weights_since)
            self._weights_since = None

    def _end_requests(self, reason: str) -> None:
        """End every request with 503.

        Requests are retracted first, because SGLang would let running ones make a last step.
        """
        if not self._boundary.requests.live():
            return
        self._boundary.retract()
        status = HTTPStatus.SERVICE_UNAVAILABLE
        finish: Any = {"type": "abort", "status_code": status, "message": reason}
        self._scheduler.abort_request(
            AbortReq(abort_all=True, abort_message=reason, finished_reason=finish)
        )
