"""Ends requests with tokens too far behind the weights.

Lag is the number of commits and rollbacks since the forward of a request's first token. Time in the
queue does not count. The limit is the request's own ``max_version_lag`` in
``sampling_params.custom_params``, SGLang's place for fields it does not know. Otherwise the
server's limit holds (``SGLANG_INFLIGHT_MAX_VERSION_LAG``). A request pinned to a version has only
its own limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_inflight.extensions.contracts import ContractsSettings
from sglang_inflight.metrics import Metrics
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.controller import COMMITS, PARTS, Controller
from sglang_inflight.scheduler.outputs import OUTPUTS
from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.settings import read
from sglang_inflight.vocabulary.contracts import MAX_VERSION_LAG, custom_param

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_inflight.sglang_types import Scheduler

# commits between a request's first token and its end
_LAG = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


@dataclass(slots=True)
class Age:
    """Epoch of a request's first token's forward; None: no commit since, or no token."""

    first_epoch: int | None = None


class Staleness:
    """Counts the lag of each request. Only the scheduler's thread touches this object."""

    def __init__(
        self, scheduler: Scheduler, boundary: Boundary, metrics: Metrics, max_lag: int | None
    ) -> None:
        self._scheduler = scheduler
        self._boundary = boundary
        self._requests = boundary.requests
        self._outdated = metrics.counter(
            "sglang:inflight_outdated_requests", "Requests ended because of max_version_lag."
        )
        self._lag = metrics.histogram(
            "sglang:inflight_version_lag",
            "Commits between the first token of a request and its end.",
            _LAG,
        )
        self._max_lag = max_lag

    def begin_epoch(self, epoch: int) -> None:
        """End requests beyond their limit, after new weights are in place.

        A request ends with the tokens it has, before its KV would be recomputed. A running request
        ends when its next result is processed. Under overlap this result is queued already, so the
        request gets no token of the new weights.
        """
        outdated: dict[Req, FINISH_ABORT] = {}
        for req in self._started():
            age = record_of(req).part(Age)
            if age.first_epoch is None:
                age.first_epoch = epoch - 1
            lag, most = epoch - age.first_epoch, self._limit(req)
            if most is not None and lag > most:
                outdated[req] = FINISH_ABORT(
                    f"The request was ended at a weight update: its oldest token is {lag} versions "
                    f"old, {MAX_VERSION_LAG} is {most}."
                )
        self._outdated.inc(len(outdated))
        self._boundary.end(outdated)

    def observe(self, req: Req, epoch: int) -> None:
        """Record the lag of a finished request."""
        first = record_of(req).part(Age).first_epoch
        self._lag.observe(0 if first is None else epoch - first)

    def _started(self) -> list[Req]:
        """Return requests with a token, or with their first token in a queued result."""
        # a chunk before a prompt's end yields no token
        sampled = {
            req
            for batch in self._requests.pending_batches
            for req in batch.reqs
            if req is not self._scheduler.chunked_req
        }
        live = self._requests.live()
        return [r for r in live if not r.finished() and (r.output_ids or r in sampled)]

    def _limit(self, req: Req) -> int | None:
        own: int | None = custom_param(req.sampling_params, MAX_VERSION_LAG)
        is_pinned = record_of(req).weights is not None
        return self._max_lag if own is None and not is_pinned else own


@PARTS.join()
def make_staleness(controller: Controller) -> Staleness:
    return Staleness(
        controller.scheduler,
        controller.boundary,
        controller.metrics,
        read(ContractsSettings).max_version_lag,
    )


@COMMITS.join()
def begin_epoch(controller: Controller) -> None:
    controller.part(Staleness).begin_epoch(controller.versions.epoch)


@OUTPUTS.join()
def observe_ended(controller: Controller, reqs: list[Req]) -> dict[str, list[Any]]:
    """Observe the lag of ended requests, and add no field."""
    staleness, epoch = controller.part(Staleness), controller.versions.epoch
    for req in reqs:
        if req.finished():
            staleness.observe(req, epoch)
    return {}
