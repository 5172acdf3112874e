"""KV transfers between a prefill and a decode server while one of them is frozen.

A KV transfer goes on while a loop is frozen. Threads of the prefill server write the KV into
memory reserved by the decode server, and the decode server's loop takes it in when it runs again.
Only the prefill server's loop must poll its transfers: it answers the request and frees its KV.

A frozen server asks the other one for nothing, and the other one waits. Each server extends
request timeouts by its own frozen time only, because neither knows the other's
(``SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`` and ``_WAITING_TIMEOUT``, 300 s).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_inflight.messages import PauseMode
from sglang_inflight.scheduler.pause.machine import DRAINING_MODES
from sglang_inflight.scheduler.requests import Requests

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import KVConnection, Scheduler

# Time between two polls of transfers by a frozen loop. A transfer lasts milliseconds.
LOOK_S = 0.005


class Transfers:
    """The KV transfers of one scheduler. Only the scheduler's thread touches it.

    Without disaggregation there are none.
    """

    def __init__(self, scheduler: Scheduler, requests: Requests) -> None:
        self._scheduler = scheduler
        self._requests = requests

    @property
    def draining_modes(self) -> tuple[PauseMode, ...]:
        """Modes that drain on this server.

        On a prefill server ``retract`` is one of them: freeing KV under a transfer would need
        both servers.
        """
        if self._scheduler.disaggregation_mode is DisaggregationMode.PREFILL:
            return (*DRAINING_MODES, "retract")
        return DRAINING_MODES

    def process_finished(self) -> None:
        """Process finished transfers. Called on all ranks in each frozen pass: a collective."""
        if self._are_under_way:
            self._scheduler.process_disagg_prefill_inflight_queue()

    @property
    def next_poll(self) -> float | None:
        """Time of the next poll, of ``time.monotonic()``; None without a transfer."""
        return time.monotonic() + LOOK_S if self._are_under_way else None

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
