"""Hold a request with a version contract until every rank serves what it asks for.

It waits at most for its ``version_timeout_s``. A commit may come between the door and the request's
first forward, so the schedulers check again (``extensions/contracts``).

A waiting request is in no queue: pauses, updates and other requests neither see it nor wait for it.
It ends with its connection, by an abort of its name, and at SIGTERM. An abort of all requests ends
those of the schedulers: a commit may send it, and this request may wait for that commit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from sglang_inflight.extensions.contracts import ContractsSettings
from sglang_inflight.frontend.aio import Lifetime
from sglang_inflight.frontend.frontend import FRONT_PARTS, HANDLERS, Frontend
from sglang_inflight.frontend.handlers import Handlers
from sglang_inflight.frontend.rank_versions import RankVersions
from sglang_inflight.frontend.requests.asked import Asked
from sglang_inflight.frontend.requests.checks import AT_THE_DOOR
from sglang_inflight.settings import read
from sglang_inflight.vocabulary.answers import Served
from sglang_inflight.vocabulary.bodies import WaitBody
from sglang_inflight.vocabulary.contracts import Contract, read_contract
from sglang_inflight.vocabulary.errors import Dropped, NotServed
from sglang_inflight.vocabulary.labels import AdapterLabel

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager


class Demand(NamedTuple):
    """One prompt's contract, and the name of its adapter."""

    contract: Contract
    adapter: str | None


def demands_of(asked: Asked) -> list[Demand]:
    """Return the demands of a call. Raises ``Refused`` for a wrong contract."""
    return [
        Demand(contract, adapter)
        for custom, adapter in asked.prompts()
        if (contract := read_contract(custom)) is not None
    ]


class _Wait:
    def __init__(self, names: frozenset[str]) -> None:
        # the caller's names of the requests
        self.names = names
        self.is_aborted = False


class VersionWaits:
    """The waits at one front end. Lives on its event loop."""

    def __init__(
        self,
        versions: RankVersions,
        adapter_label: Callable[[str], AdapterLabel | None],
        lifetime: Lifetime,
        *,
        timeout_s: float,
    ) -> None:
        """``timeout_s`` is the longest wait of a contract that names none.

        ``adapter_label`` returns the version that new requests of an adapter get, or None.
        """
        self._versions = versions
        self._adapter_label = adapter_label
        self._lifetime = lifetime
        self._timeout_s = timeout_s
        self._waits: set[_Wait] = set()

    def begin(self, asked: Asked) -> Awaitable[None] | None:
        """Return what waits until all contracts of a call hold; None if they hold now."""
        demands = demands_of(asked)
        return self._wait(demands, asked.names) if self._why_not(demands) is not None else None

    async def _wait(self, demands: list[Demand], names: Iterable[str]) -> None:
        """Wait until all ``demands`` hold. An abort of one of ``names`` ends the wait.

        Raises ``NotServed`` when its time is over.
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
        if (why := self._why_not_served(contract)) is not None:
            return why
        if adapter is None or not contract.is_about_adapter:
            return None
        served = self._adapter_label(adapter)
        if served is None:
            return f"the adapter {adapter!r} is not loaded"
        return contract.why_broken_by_adapter(served)


@FRONT_PARTS.join()
def make_waits(frontend: Frontend, _: TokenizerManager) -> VersionWaits:
    waits = VersionWaits(
        frontend.versions,
        lambda name: frontend.adapter_label(name),
        frontend.lifetime,
        timeout_s=read(ContractsSettings).version_timeout_s,
    )
    frontend.end_waits = waits.abort
    return waits


@HANDLERS.join()
def add_handler(frontend: Frontend, _: TokenizerManager, handlers: Handlers) -> Handlers:
    return handlers.with_more({"wait_for_epoch": frontend.part(VersionWaits).wait_for_epoch})


@AT_THE_DOOR.join(order=60)
def wait_for_version(frontend: Frontend, asked: Asked) -> Awaitable[None] | None:
    """Return what waits until every rank serves what the request asks for, unless they do now."""
    return frontend.part(VersionWaits).begin(asked)
