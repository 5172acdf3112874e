"""Let new requests through to the schedulers, or hold them at the front end.

A request with a version contract waits here until every rank serves what it asks for, at most for
its ``version_timeout_s``. A commit may come between this door and the request's first forward, so
the schedulers check again (``extensions/contracts``).

A waiting request is in no queue: pauses, updates and other requests neither see it nor wait for it.
It ends with its connection, by an abort of its name, and at SIGTERM. An abort of all requests ends
those of the schedulers: a commit may send it, and this request may wait for that commit.

While a held pause says ``new_requests: "reject"``, no request passes, whatever its contract. The
same holds while the server is behind its fleet (``fleet_version.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from sglang_inflight.frontend.aio import Lifetime
from sglang_inflight.frontend.fleet_version import FleetVersion
from sglang_inflight.frontend.pauses import Pauses
from sglang_inflight.frontend.served_versions import ServedVersions
from sglang_inflight.sglang_types import get_disagg
from sglang_inflight.vocabulary.answers import Served
from sglang_inflight.vocabulary.bodies import WaitBody
from sglang_inflight.vocabulary.contracts import CUSTOM_PARAMS, Contract, read_contract
from sglang_inflight.vocabulary.errors import Behind, Dropped, NotServed, Refused, Rejected
from sglang_inflight.vocabulary.labels import AdapterLabel


class Demand(NamedTuple):
    """One request's contract, and the name of its adapter."""

    contract: Contract
    adapter: str | None


class _Wait:
    def __init__(self, names: frozenset[str]) -> None:
        # the caller's names of the requests
        self.names = names
        self.is_aborted = False


class Admission:
    """The gate of one front end. Lives on its event loop."""

    def __init__(
        self,
        versions: ServedVersions,
        pauses: Pauses,
        adapter_label: Callable[[str], AdapterLabel | None],
        fleet_version: FleetVersion,
        lifetime: Lifetime,
        *,
        timeout_s: float,
    ) -> None:
        """``timeout_s`` is the longest wait of a contract that names none.

        ``adapter_label`` returns the version that new requests of an adapter get, or None.
        """
        self._versions = versions
        self._pauses = pauses
        self._adapter_label = adapter_label
        self._fleet_version = fleet_version
        self._lifetime = lifetime
        self._timeout_s = timeout_s
        # set in a tokenizer worker, by the owner's state
        self.owner_rejects = False
        self._waits: set[_Wait] = set()
        self._is_half = get_disagg().disaggregation_mode != "null"
        # a decode server may send it running requests, to recompute their KV
        self._is_prefill = get_disagg().disaggregation_mode == "prefill"

    @property
    def rejects(self) -> bool:
        """Whether a held pause rejects new requests."""
        return self.owner_rejects or self._pauses.rejects

    def require_open(self) -> None:
        """Raise ``Rejected`` while a held pause rejects new requests, ``Behind`` for a version.

        A prefill server takes requests of every version of its fleet.
        """
        behind = None if self._is_prefill else self._fleet_version.why_behind
        if behind is not None:
            raise Behind(
                f"{behind}. Send the request to another server, or again later",
                self._versions.first,
            )
        if self.rejects:
            raise Rejected(
                'generation is paused with new_requests="reject": send the request to another '
                "server, or again later",
                self._versions.first,
            )

    def must_wait(self, demands: Iterable[Demand]) -> bool:
        """Return whether a demand does not hold now. Raises ``Refused`` for one out of place."""
        return self._why_not(demands) is not None

    async def wait(self, demands: list[Demand], names: Iterable[str]) -> None:
        """Wait until all ``demands`` of a call hold. An abort of one of ``names`` ends the wait.

        Raises ``NotServed`` when its time is over, ``Rejected`` if a pause rejects requests then.
        """
        given = [demand.contract.version_timeout_s for demand in demands]
        seconds = max(self._timeout_s if each is None else each for each in given)
        with self._waiting(names) as wait:

            def why_not() -> str | None:
                if wait.is_aborted:
                    raise Dropped("the request was aborted while it waited for its version")
                return self._why_not(demands)

            why = await self._lifetime.unless_shut_down(self._versions.until(why_not, seconds))
        if why is not None:
            raise NotServed(
                f"{why}. The request waited {seconds:g} s for its version", self._versions.first
            )
        self.require_open()

    def abort(self, name: str) -> int:
        """End the waits of the requests called ``name``; return their number."""
        ended = [wait for wait in self._waits if name in wait.names and not wait.is_aborted]
        for wait in ended:
            wait.is_aborted = True
        self._versions.notify()
        return len(ended)

    async def wait_for_epoch(self, body: WaitBody) -> Served:
        """Answer as soon as every rank serves what ``body`` names. Raises ``NotServed``."""
        contract = Contract(min_epoch=body.epoch, exact_weight_version=body.weight_version)
        seconds = self._timeout_s if body.timeout_s is None else body.timeout_s

        waiting = self._versions.until(lambda: self._why_not_served(contract), seconds)
        if await self._lifetime.unless_shut_down(waiting) is not None:
            asked = [
                f"{name} {value!r}"
                for name, value in (("epoch", body.epoch), ("version", body.weight_version))
                if value is not None
            ]
            first = self._versions.first
            raise NotServed(
                f"{' and '.join(asked)}: not served after {seconds:g} s, and version "
                f"{first.version!r} (epoch {first.epoch}) is served",
                first,
            )
        first = self._versions.first
        return Served(weight_version=first.version, epoch=first.epoch)

    @contextmanager
    def _waiting(self, names: Iterable[str]) -> Iterator[_Wait]:
        wait = _Wait(frozenset(names))
        self._waits.add(wait)
        try:
            yield wait
        finally:
            self._waits.discard(wait)

    def _why_not(self, demands: Iterable[Demand]) -> str | None:
        return next(filter(None, map(self._why_broken, demands)), None)

    def _why_not_served(self, contract: Contract) -> str | None:
        """Return why a rank's weights break the contract, or None if no rank's do."""
        return next(filter(None, map(contract.why_broken, self._versions.labels)), None)

    def _why_broken(self, demand: Demand) -> str | None:
        contract, adapter = demand
        if contract.min_epoch is not None and self._is_half:
            raise Refused(
                "min_epoch: the two servers of a pair (--disaggregation-mode) count epochs of "
                "their own; use min_weight_version or exact_weight_version"
            )
        if contract.is_about_adapter and adapter is None:
            raise Refused(
                "min_adapter_version and exact_adapter_version need a request with an adapter"
            )
        if (why := self._why_not_served(contract)) is not None:
            return why
        if adapter is None or not contract.is_about_adapter:
            return None
        served = self._adapter_label(adapter)
        if served is None:
            return f"the adapter {adapter!r} is not loaded"
        return contract.why_broken_by_adapter(served)


def demands_of(obj: Any) -> list[Demand]:
    """Return the demands of a ``GenerateReqInput``, for a batch those of each request."""
    params, adapters = getattr(obj, "sampling_params", None), getattr(obj, "lora_path", None)
    count = max(len(each) if isinstance(each, list) else 1 for each in (params, adapters))
    return [
        Demand(contract, adapter)
        for each, adapter in zip(_spread(params, count), _spread(adapters, count), strict=False)
        if isinstance(each, dict) and (contract := read_contract(each.get(CUSTOM_PARAMS)))
    ]


def _spread(value: Any, count: int) -> list[Any]:
    return value if isinstance(value, list) else [value] * count


def names_of(rid: object) -> list[str]:
    """Return the caller's names of a call's requests."""
    return [each for each in (rid if isinstance(rid, list) else [rid]) if isinstance(each, str)]


def is_health_check(obj: Any) -> bool:
    return any(name.startswith(HEALTH_CHECK_RID_PREFIX) for name in names_of(obj.rid))
