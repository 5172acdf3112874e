"""What goes on between a prefill server and a decode server while one of them is frozen.

KV that is on its way when a loop freezes goes on by itself: threads of the prefill server write
it into memory that the decode server has set aside, and its loop takes it in when it runs again.
Only the prefill server's loop has to look: it then answers the request and frees its KV.

A server that is frozen asks the other one for nothing, and the other one waits. Each forgives the
time that it was frozen itself; that of the other it does not know
(``SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`` and ``_WAITING_TIMEOUT``, 300 s).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_inflight.messages import PauseMode
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.pause.machine import DRAINING_MODES

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.req import KVConnection
    from sglang_inflight.scheduler.sglang_types.scheduler import Scheduler

# How often a frozen loop looks after transfers. They last milliseconds.
LOOK_S = 0.005


class Transfers:
    """Of one scheduler, whose thread alone touches it. Without another server there are none."""

    def __init__(self, scheduler: Scheduler, boundary: Boundary) -> None:
        self._scheduler = scheduler
        self._boundary = boundary

    @property
    def draining_modes(self) -> tuple[PauseMode, ...]:
        """On a prefill server ``retract`` is one: to take KV back from under a transfer, both
        servers would have to be told.
        """
        if self._scheduler.disaggregation_mode is DisaggregationMode.PREFILL:
            return (*DRAINING_MODES, "retract")
        return DRAINING_MODES

    def go_on(self) -> None:
        """In each pass of a loop that is frozen, on all ranks: it is a collective over them."""
        if self._are_under_way:
            self._scheduler.process_disagg_prefill_inflight_queue()

    @property
    def next_look(self) -> float | None:
        """Of ``time.monotonic()``; None where nothing is under way."""
        return time.monotonic() + LOOK_S if self._are_under_way else None

    @property
    def _are_under_way(self) -> bool:
        """The same on all ranks: they agree on each request's state.

        One that nobody has asked for yet may be waited for as long as the other server is frozen.
        """
        scheduler = self._scheduler
        return scheduler.disaggregation_mode is DisaggregationMode.PREFILL and any(
            not req.pending_bootstrap for req in scheduler.disagg_prefill_inflight_queue
        )

    def extend_request_timeouts(self, seconds: float) -> None:
        """Count the last ``seconds``, for which this server was frozen, to no time limit."""
        now = time.time()
        for connection in self._connections():
            for name in ("init_time", "_prefill_complete_time", "_prefill_wait_start"):
                # each end has its own, and those that SGLang's tests use have none
                since: float | None = getattr(connection, name, None)
                if since is not None:
                    # no more of them than there were since
                    setattr(connection, name, min(since + seconds, now))

    def _connections(self) -> Iterator[KVConnection | None]:
        scheduler = self._scheduler
        if scheduler.disaggregation_mode is DisaggregationMode.PREFILL:
            yield from (req.disagg_kv_sender for req in self._boundary.live_requests())
        elif scheduler.disaggregation_mode is DisaggregationMode.DECODE:
            for queue in (
                scheduler.disagg_decode_prealloc_queue,
                scheduler.disagg_decode_transfer_queue,
            ):
                yield from (entry.kv_receiver for entry in queue.queue)
