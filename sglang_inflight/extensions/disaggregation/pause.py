"""Pauses of a prefill or a decode server: KV transfers while it is frozen, requests that drain.

A KV transfer goes on while a loop is frozen. Threads of the prefill server write the KV into
memory reserved by the decode server, and the decode server's loop takes it in when it runs again.
Only the prefill server's loop must poll its transfers: it answers the request and frees its KV.

A frozen server asks the other one for nothing, and the other one waits. Each server extends
request timeouts by its own frozen time only, because neither knows the other's
(``SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`` and ``_WAITING_TIMEOUT``, 300 s).

This module hooks a decode server's choices of requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_inflight.hooking import AFTER, AROUND, DECODE, PREFILL_SCHEDULER, hook
from sglang_inflight.messages import PauseMode
from sglang_inflight.scheduler.controller import Controller
from sglang_inflight.scheduler.pause.machine import PauseState
from sglang_inflight.scheduler.pause.pause import FROZEN
from sglang_inflight.scheduler.requests import Requests

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_inflight.sglang_types import KVConnection, Scheduler

# Time between two polls of transfers by a frozen loop. A transfer lasts milliseconds.
POLL_S = 0.005


class Transfers:
    """The KV transfers of one scheduler, work of its frozen loop.

    Without disaggregation there are none.
    """

    def __init__(self, scheduler: Scheduler, requests: Requests) -> None:
        self._scheduler = scheduler
        self._requests = requests

    @property
    def draining_modes(self) -> tuple[PauseMode, ...]:
        """``retract`` on a prefill server: freeing KV under a transfer would need both servers."""
        is_prefill = self._scheduler.disaggregation_mode is DisaggregationMode.PREFILL
        return ("retract",) if is_prefill else ()

    def do(self) -> None:
        """Process finished transfers: a collective."""
        if self._are_under_way:
            self._scheduler.process_disagg_prefill_inflight_queue()

    @property
    def next_time(self) -> float | None:
        """Time of the next poll; None without a transfer."""
        return time.monotonic() + POLL_S if self._are_under_way else None

    @property
    def _are_under_way(self) -> bool:
        """Whether a transfer is under way. The same on all ranks: they agree on request states.

        A request with a pending bootstrap does not count: the decode server may be frozen, and
        ask for its KV late.
        """
        scheduler = self._scheduler
        return scheduler.disaggregation_mode is DisaggregationMode.PREFILL and any(
            not req.pending_bootstrap for req in scheduler.disagg_prefill_inflight_queue
        )

    def extend_request_timeouts(self, seconds: float) -> None:
        """Extend the timeouts of transfers by the ``seconds`` for which this server was frozen."""
        now = time.time()
        for connection in self._connections():
            for name in ("init_time", "_prefill_complete_time", "_prefill_wait_start"):
                # the sender and the receiver have different fields, SGLang's test doubles none
                since: float | None = getattr(connection, name, None)
                if since is not None:
                    # not into the future: the transfer may have begun during the pause
                    setattr(connection, name, min(since + seconds, now))

    def _connections(self) -> Iterator[KVConnection | None]:
        scheduler = self._scheduler
        if scheduler.disaggregation_mode is DisaggregationMode.PREFILL:
            yield from (req.disagg_kv_sender for req in self._requests.live())
        elif scheduler.disaggregation_mode is DisaggregationMode.DECODE:
            for queue in (
                scheduler.disagg_decode_prealloc_queue,
                scheduler.disagg_decode_transfer_queue,
            ):
                yield from (entry.kv_receiver for entry in queue.queue)


@FROZEN.join()
def make_transfers(scheduler: Scheduler, requests: Requests) -> Transfers:
    return Transfers(scheduler, requests)


@hook(
    f"{DECODE}.SchedulerDisaggregationDecodeMixin._get_new_prebuilt_batch", AROUND, via="inflight"
)
def admit(controller: Controller, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return controller.admit(schedule, *args, **kwargs)


@hook(f"{DECODE}.DecodePreallocQueue.pop_preallocated", AROUND, via="scheduler.inflight")
def ask_for_kv(controller: Controller, ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``ask``, and show it only the requests that may run now.

    ``ask`` chooses the requests whose KV the prefill server is to send.
    """
    pause = controller.pause
    if pause.state is not PauseState.DRAINING:
        return ask(*args, **kwargs)
    prealloc = controller.scheduler.disagg_decode_prealloc_queue
    held = [entry for entry in prealloc.queue if not pause.admits(entry.req)]
    prealloc.queue = [entry for entry in prealloc.queue if pause.admits(entry.req)]
    try:
        return ask(*args, **kwargs)
    finally:
        prealloc.queue = prealloc.queue + held


@hook(f"{PREFILL_SCHEDULER}.optimistic_release_and_requeue", AFTER, order=1, via="inflight")
def enqueue_again(controller: Controller, _: None, req: Req) -> None:
    """Prepare ``req``, queued again on a prefill server that released its KV."""
    controller.versions.forget_tokens(req)
    controller.prepare(req)
