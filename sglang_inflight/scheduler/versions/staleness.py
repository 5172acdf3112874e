"""Requests whose tokens fall too far behind the weights end.

Lag is counted in commits (and rollbacks) since the forward that made a request's first
token, not since the request came: what waits in the queue does not age. ``max_version_lag``
is a request's own (``sampling_params.custom_params``, upstream's place for what it does not
know) or the server's (``SGLANG_INFLIGHT_MAX_VERSION_LAG``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.common import discard_kv_cache_backup, release_kv_cache

from sglang_inflight.messages import MAX_VERSION_LAG
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.metrics import Metrics
from sglang_inflight.scheduler.versions.request_record import record_of
from sglang_inflight.sglang_types.runtime_context import get_disagg

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.req import Req
    from sglang_inflight.scheduler.sglang_types.scheduler import Scheduler


class Staleness:
    """Counts the lag of each request. Only the scheduler's thread touches it."""

    def __init__(
        self, scheduler: Scheduler, boundary: Boundary, metrics: Metrics, max_lag: int | None
    ) -> None:
        self._scheduler = scheduler
        self._boundary = boundary
        self._metrics = metrics
        self._max_lag = max_lag

    def begin_epoch(self, epoch: int) -> None:
        """New weights are in place: end what they leave too far behind.

        Before anything is recomputed for it, and with the tokens that it has. What runs
        ends when its next result is processed: under overlap that is the one which is
        queued, so no token of the new weights is added to it.
        """
        for req in self._started():
            record = record_of(req)
            if record.first_epoch is None:
                record.first_epoch = epoch - 1
            lag, most = epoch - record.first_epoch, self._limit(req)
            if most is not None and lag > most:
                self._end(
                    req, f"its oldest token is {lag} versions old, {MAX_VERSION_LAG} is {most}"
                )

    def observe(self, req: Req, epoch: int) -> None:
        """A request has finished."""
        first = record_of(req).first_epoch
        self._metrics.version_lag.observe(0 if first is None else epoch - first)

    def _started(self) -> list[Req]:
        """Requests that have a token, or whose first token is in a queued result."""
        # of a prompt that is not yet whole a forward makes none
        sampled = {
            req
            for batch in self._boundary.pending_batches
            for req in batch.reqs
            if req is not self._scheduler.chunked_req
        }
        live = self._boundary.live_requests()
        return [r for r in live if not r.finished() and (r.output_ids or r in sampled)]

    def _limit(self, req: Req) -> int | None:
        custom = req.sampling_params.custom_params
        own = custom.get(MAX_VERSION_LAG) if isinstance(custom, dict) else None
        return self._max_lag if own is None else own

    def _end(self, req: Req, why: str) -> None:
        self._metrics.outdated.inc()
        req.to_finish = FINISH_ABORT(f"The request was ended at a weight update: {why}.")
        scheduler = self._scheduler
        if req not in scheduler.waiting_queue:
            return
        scheduler.waiting_queue.remove(req)
        req.update_finish_state()
        scheduler._release_aborted_request(req)
        if scheduler.disaggregation_mode is DisaggregationMode.DECODE:
            self._release_kv(req)
        req.time_stats.set_completion_time()
        scheduler.output_streamer.stream_output([req], req.return_logprob)

    def _release_kv(self, req: Req) -> None:
        """What waits on a decode server has its KV, and elsewhere none. As SGLang's abort does.

        That abort itself would end every request whose id begins with this one's, and forget
        tokens that were not sent yet.
        """
        scheduler = self._scheduler
        if get_disagg().disaggregation_decode_host_receive_threshold < 1:
            discard_kv_cache_backup(req, scheduler.tree_cache, "host_pool")
        if scheduler.hisparse_coordinator is not None:
            scheduler.hisparse_coordinator.request_finished(req)
        release_kv_cache(req, scheduler.tree_cache, checkpoint=True)
