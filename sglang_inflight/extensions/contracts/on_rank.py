"""Keeps version contracts: no request gets a first token that breaks its own.

The front end holds a request until its contract holds (``version_waits.py``), but
a commit may come between its door and the first forward. So the scheduler decides, at two moments:
when a request enters the waiting queue, and when the weights, their name, or a request's adapter
change.
Between these moments neither the served version nor the contract changes. So the first
token's forward runs with a version that satisfies the contract.

A request with a token, or with its first token in a queued result, keeps it, and its contract is
fulfilled. That holds after a retraction, too, if the request keeps its tokens. A beam search begins
anew, and is checked anew.

A commit ends few of many queued requests itself, and no batch takes the others (``Boundary.end``).

Every rank of a replica handles the same messages between the same steps, and so ends the same
requests. Only the scheduler's thread touches this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler import _make_abort_req

from sglang_inflight.hooking import AFTER, PREFILL_SCHEDULER, hook
from sglang_inflight.metrics import Metrics
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.by_version import send_abort_output
from sglang_inflight.scheduler.controller import ADMISSIONS, COMMITS, PARTS, RELABELS, Controller
from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.scheduler.versions.token_versions import AdapterVersions, Versions
from sglang_inflight.vocabulary.contracts import Contract, read_contract

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang.srt.managers.schedule_batch import Req

    from sglang_inflight.sglang_types import Scheduler


@dataclass(slots=True)
class _Read:
    """A request's contract, which does not change."""

    contract: Contract | None = None
    is_read: bool = False


class Contracts:
    """Ends the requests of one scheduler whose contract does not hold any more."""

    def __init__(
        self,
        scheduler: Scheduler,
        boundary: Boundary,
        versions: Versions,
        adapters: AdapterVersions,
        metrics: Metrics,
    ) -> None:
        self._scheduler = scheduler
        self._boundary = boundary
        self._versions = versions
        self._adapters = adapters
        self._broken = metrics.counter(
            "sglang:inflight_broken_contract_requests",
            "Requests ended because their version contract did not hold any more.",
        )

    def admits(self, req: Req) -> bool:
        """Return whether ``req`` may enter the waiting queue; answer it otherwise."""
        why = self._why_broken(req)
        if why is None:
            return True
        self._broken.inc()
        send_abort_output(
            self._scheduler, _make_abort_req(req, finished_reason=_reason(why).to_json()), req
        )
        self._scheduler._release_aborted_request(req)
        return False

    def check_waiting(self) -> None:
        """End the requests without a token whose contract the weights in place would break.

        A decode server checks at the entry, and the first token when it comes from the prefill
        server: what it makes itself comes after the first token.
        """
        if self._scheduler.disaggregation_mode is not DisaggregationMode.DECODE:
            self.check(self._boundary.requests.waiting())
            if (chunked := self._scheduler.chunked_req) is not None:
                self._end_chunked(chunked)

    @hook(
        f"{PREFILL_SCHEDULER}.optimistic_release_and_requeue",
        AFTER,
        order=2,
        via=lambda scheduler: scheduler.inflight.part(Contracts),
    )
    def check_again(self, _: None, req: Req) -> None:
        """Check ``req``, queued again by SGLang itself, after the core has prepared it."""
        self.check([req])

    def check(self, reqs: Iterable[Req]) -> None:
        """End those of the queued ``reqs`` that have no token and a broken contract."""
        broken = {req: why for req in reqs if (why := self._why_broken(req)) is not None}
        if broken:
            self._broken.inc(len(broken))
            self._end_queued({req: _reason(why) for req, why in broken.items()})

    def _why_broken(self, req: Req) -> str | None:
        """Return why ``req``, which has no token, must end; None for any other request."""
        contract = contract_of(req)
        if contract is None or _is_settled(req):
            return None
        why = contract.why_broken(self._versions.label)
        return why or contract.why_broken_by_adapter(self._adapters.of(req))

    def _end_queued(self, broken: dict[Req, FINISH_ABORT]) -> None:
        scheduler = self._scheduler
        if scheduler.disaggregation_mode is DisaggregationMode.PREFILL:
            for req in scheduler.disagg_prefill_bootstrap_queue.queue:
                # an abort would report a failed transfer. So its prefill's result is discarded.
                if (reason := broken.pop(req, None)) is not None:
                    req.discard_output_reason = reason
        self._boundary.end(broken)

    def _end_chunked(self, req: Req) -> None:
        """End a request in the middle of its prompt, before its next chunk."""
        if (why := self._why_broken(req)) is not None:
            self._broken.inc()
            req.discard_output_reason = _reason(why)
            self._scheduler._pending_chunked_abort_req = req


@PARTS.join()
def make_contracts(controller: Controller) -> Contracts:
    return Contracts(
        controller.scheduler,
        controller.boundary,
        controller.versions,
        controller.adapter_versions,
        controller.metrics,
    )


@ADMISSIONS.join()
def admits(controller: Controller, req: Req) -> bool:
    return controller.part(Contracts).admits(req)


# after the requests with too old tokens are ended
@COMMITS.join(order=1)
@RELABELS.join()
def check_waiting(controller: Controller) -> None:
    controller.part(Contracts).check_waiting()


def contract_of(req: Req) -> Contract | None:
    """Return the contract of ``req``, which does not change: it is read once."""
    record = record_of(req).part(_Read)
    if not record.is_read:
        record.contract = read_contract(req.sampling_params.custom_params)
        record.is_read = True
    return record.contract


def _is_settled(req: Req) -> bool:
    """Return whether ``req`` has a token, or ends without one."""
    # a decode server keeps the last token apart while the prefill server recomputes the KV
    has_token = bool(req.output_ids) or req.pd_rebootstrap_forced_output_id is not None
    return has_token or req.to_finish is not None or req.finished()


def _reason(why: str) -> FINISH_ABORT:
    return FINISH_ABORT(describe_broken(why), HTTPStatus.SERVICE_UNAVAILABLE)


def describe_broken(why: str) -> str:
    return f"The version contract does not hold: {why}."
