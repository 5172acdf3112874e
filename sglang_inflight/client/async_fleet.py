"""Client of many servers, for an event loop: all servers change, or none does.

    phase     each server                        if one fails
    begin     opens a session, with a lease      all are dropped: ``FleetRefused``
    stage     fills it, once or many times       all are dropped: ``FleetRefused``
    seal      checks it and votes                all are dropped: ``FleetRefused``
    commit    swaps it in                        the others have: ``FleetSplit``

A sealed server cannot refuse the commit. So a commit fails only if a server dies, is cut off, or
loses its session between seal and commit. No protocol closes that window. The report says for
each server whether it has changed.

Prefill servers commit, pause and resume before decode servers, because a decode server may need a
prompt's KV from the new weights. If a prefill server fails to commit, no decode server is asked
to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
)
from contextlib import asynccontextmanager
from typing import Any, Unpack

import anyio
import httpx

from sglang_inflight.client.aio import ContextGroup, together
from sglang_inflight.client.answers import Json, NoAnswer
from sglang_inflight.client.async_client import LEASE_S, TIMEOUT_S, AsyncClient, Source
from sglang_inflight.client.fields import FleetDiskOptions, FleetFields, OnProgress, UpdateOptions
from sglang_inflight.client.report import A, FleetRefused, FleetSplit, PauseLost, Phase, Report
from sglang_inflight.client.returning import (
    CaughtUp,
    FleetsVersion,
    FleetTable,
    VersionUnclear,
    find_version,
    make_table,
    peers_of,
)
from sglang_inflight.client.rollouts.rollouts import Rollouts
from sglang_inflight.vocabulary.answers import (
    Answer,
    Begun,
    Expected,
    Grant,
    NewRequests,
    Offered,
    PauseMode,
    Receipt,
    Served,
    StagedSoFar,
    Status,
)
from sglang_inflight.vocabulary.bodies import SERVED, OnBusy, Selector
from sglang_inflight.vocabulary.errors import Conflict, InflightError, Refused
from sglang_inflight.vocabulary.kept_kv import KVPolicy

logger = logging.getLogger(__name__)

# time for an interrupted commit to finish: half a commit splits the fleet
INTERRUPTED_S = 10.0

# a trainer may commit while a server catches up, and then it catches up again
_ROUNDS = 3

# fields of ``update`` that belong to its session
_OF_SESSION = (
    "weight_version",
    "kv_cache",
    "kv_max_age",
    "partial",
    "expected_version",
    "on_busy",
    "lease_s",
    "selector",
)


class AsyncFleet:
    """Concurrent calls to all servers. Belongs to the event loop of its first use.

    Raises ``FleetRefused`` if a server failed and none has changed, ``FleetSplit`` if some have
    or may have. For retries and time limits see ``AsyncClient``.
    """

    def __init__(
        self, urls: Iterable[str], *, api_key: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Create a fleet. Raises ``ValueError`` for no URL, or for the same URL twice."""
        self.servers = tuple(AsyncClient(url, api_key=api_key, timeout_s=timeout_s) for url in urls)
        if not self.servers:
            raise ValueError("a fleet needs a server")
        if len({server.url for server in self.servers}) < len(self.servers):
            raise ValueError("a server is named twice")
        self._in_session = False
        self._rollouts = Rollouts(self.servers, lambda: self.left_out)
        # URLs of the servers that take no part in updates, pauses and rollbacks
        self.left_out: set[str] = set()

    @property
    def taking_part(self) -> tuple[AsyncClient, ...]:
        """The servers that are not left out."""
        return tuple(server for server in self.servers if server.url not in self.left_out)

    def leave_out(self, urls: Iterable[str]) -> None:
        """Go on without some servers: those that are dead, or that leave the fleet.

        Updates, pauses and rollbacks are those of the other servers, which must be all or none. A
        server that is left out serves what it served, if it serves. ``catch_up`` brings it to the
        fleet's version, and from then on it takes part again. Raises ``ValueError`` for an unknown
        URL, or if no server would be left.
        """
        left_out = self.left_out | {*urls}
        known = {server.url for server in self.servers}
        if unknown := left_out - known:
            raise ValueError(f"no server of this fleet: {', '.join(sorted(unknown))}")
        if left_out == known:
            raise ValueError("a fleet needs a server that is not left out")
        self.left_out = left_out

    async def __aenter__(self) -> AsyncFleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await together(server.aclose() for server in self.servers)

    async def status(self) -> Report[Status]:
        """Return the status of each server, also of those that are left out.

        Raises nothing: failures are in the report.
        """
        every = [server.url for server in self.servers]
        return await self._everywhere(Report("status"), AsyncClient.status, every)

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """Make a rollout, and return the answer to ``body``, which is one of ``/generate``.

        The answer is an object, or a list of objects for samples and batches.

        The rollout outlives its server: if that dies or drains, the rollout goes on at another one
        from the tokens that have come. ``meta_info.servers`` says where which tokens were made.
        Samples and prompts of a batch are rollouts of their own. A server is chosen by version,
        cached prefix and load.

        Raises ``Refused`` for a request that a server refuses, and ``RolloutLost`` if no server
        takes it for ten minutes.
        """
        return await self._rollouts.generate(body)

    def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Json]:
        """Yield the answer of ``generate`` as it grows, each time from its first token on.

        Answers of samples and batches have an ``index``. A rollout whose records no other server
        has raises ``RolloutLost`` when it would have to move.
        """
        return self._rollouts.stream(body)

    async def wait_for(
        self, *, weight_version: str, timeout_s: float | None = None
    ) -> Report[Served]:
        """Wait on each server for the version (``AsyncClient.wait_for``).

        Servers count epochs of their own, so a fleet waits for a name. Raises nothing: failures
        are in the report.
        """

        async def wait(server: AsyncClient) -> Served:
            return await server.wait_for(weight_version=weight_version, timeout_s=timeout_s)

        return await self._everywhere(Report("wait"), wait)

    @asynccontextmanager
    async def paused(
        self,
        mode: PauseMode = "in_place",
        *,
        lease_s: float = LEASE_S,
        timeout_s: float | None = None,
        new_requests: NewRequests = "queue",
    ) -> AsyncIterator[Report[Grant]]:
        """Pause all servers for the duration of the block, or none (``AsyncClient.paused``).

        Raises ``PauseLost`` at the end of the block if a server's pause was lost.
        """
        async with ContextGroup() as blocks:

            async def enter(server: AsyncClient) -> Grant:
                block = server.paused(
                    mode, lease_s=lease_s, timeout_s=timeout_s, new_requests=new_requests
                )
                return await blocks.enter(server.url, block)

            turns = _prefill_first(await self._all_or_none("pause", AsyncClient.status))
            granted = Report[Grant]("pause")
            for turn in turns:
                await self._everywhere(granted, enter, turn)
                _require_all(granted)
            yield granted
            report = Report[Answer]("resume")
            for turn in turns:
                await blocks.leave(report, turn)
            if report.failures:
                raise PauseLost(report)

    async def update(
        self,
        /,
        source: Source,
        *,
        on_progress: OnProgress | None = None,
        **fields: Unpack[FleetFields],
    ) -> Report[Receipt] | Report[Receipt | StagedSoFar]:
        """Stage the same weights on all servers, and commit if every server succeeded.

        Inside ``session`` the weights are only staged. ``fields`` are the fields of ``session``
        and of ``AsyncClient.update``. The report has the receipts.
        """
        if self._in_session:
            return await self._stage(source, on_progress=on_progress, **fields)
        given: dict[str, Any] = {**fields}
        of_session = {name: given.pop(name) for name in _OF_SESSION if name in given}
        if of_session.get("partial") is None:
            of_session["partial"] = source != "disk"
        async with self._two_phases(on_progress=on_progress, **of_session) as report:
            # the policy here too, so that a server refuses an unsupported one before the seal
            kept = {name: of_session.get(name) for name in ("kv_cache", "kv_max_age")}
            await self._stage(source, **kept, **given)
        return report

    async def update_from_disk(
        self,
        /,
        model_path: str,
        *,
        weight_version: str | None = None,
        on_progress: OnProgress | None = None,
        **fields: Unpack[FleetDiskOptions],
    ) -> Report[Receipt] | Report[Receipt | StagedSoFar]:
        """Call ``update`` with a checkpoint's folder, a path on every server."""
        return await self.update(
            "disk",
            model_path=model_path,
            weight_version=weight_version,
            on_progress=on_progress,
            **fields,
        )

    @asynccontextmanager
    async def session(
        self,
        /,
        *,
        weight_version: str | None = None,
        kv_cache: KVPolicy | None = None,
        kv_max_age: int | None = None,
        lease_s: float = LEASE_S,
        on_progress: OnProgress | None = None,
        partial: bool | None = None,
        on_busy: OnBusy = "refuse",
        selector: Selector | None = None,
        expected_version: str | None = None,
        expected_digest: str | None = None,
        received_digest: bool = False,
    ) -> AsyncIterator[Report[Receipt]]:
        """Open a session on all servers. At the block's end all commit its updates, or none.

        The yielded report has the receipts after the block. If the block raises, nothing has
        changed. ``kv_cache`` or ``kv_max_age`` overrides the updates' policies. A server busy
        with another update refuses: two trainers waiting for each other's servers would deadlock.
        ``expected_digest`` is as in ``AsyncClient.session``: if one server received something else,
        none commits.
        """
        async with self._two_phases(
            weight_version=weight_version,
            kv_cache=kv_cache,
            kv_max_age=kv_max_age,
            on_busy=on_busy,
            lease_s=lease_s,
            on_progress=on_progress,
            partial=partial,
            selector=selector,
            expected_version=expected_version,
            expected_digest=expected_digest,
            received_digest=received_digest or expected_digest is not None,
        ) as report:
            self._in_session = True
            try:
                yield report
            finally:
                self._in_session = False

    async def roll_back(
        self,
        *,
        weight_version: str | None = None,
        expected_version: str | None = None,
        only: Collection[str] | None = None,
    ) -> Report[Receipt]:
        """Return to the version before the last commit, on the URLs of ``only`` or on all.

        ``only=error.report.answers`` undoes the commits of a ``FleetSplit``.
        """

        async def roll_back(server: AsyncClient) -> Receipt:
            return await server.roll_back(
                weight_version=weight_version, expected_version=expected_version
            )

        report = Report[Receipt]("roll back")
        wanted = [server.url for server in self.taking_part if only is None or server.url in only]
        # a server without a status rolls back with the decode servers
        for turn in _prefill_first(await self.status(), wanted):
            await self._everywhere(report, roll_back, turn)
        _require_one_side(report)
        return report

    # ---- returning servers ---------------------------------------------------------------

    async def table(self, *, weight_version: str | None = None) -> FleetTable:
        """Return what each server serves, and whether it is behind the fleet.

        The fleet's version is ``weight_version``, or the one of more than half of the servers.
        Raises nothing: a silent server has a row that says so.
        """
        found = await self.status()
        whys: dict[str, str | None] = {
            url: str(error) or type(error).__name__ for url, error in found.failures.items()
        }

        async def ask(server: AsyncClient) -> None:
            try:
                whys[server.url] = await server.why_not_ready()
            except (InflightError, httpx.HTTPError) as error:
                whys[server.url] = str(error) or type(error).__name__

        await together(ask(server) for server in self.servers if server.url in found.answers)
        urls = [server.url for server in self.servers]
        return make_table(urls, found.answers, whys, weight_version)

    async def catch_up(
        self,
        folder: str | None = None,
        *,
        weight_version: str | None = None,
        keeps_folder: bool = False,
    ) -> Report[CaughtUp]:
        """Bring the servers that are behind to the fleet's version, without a trainer.

        A server that serves the version sends its weights to them over the network, rank to rank.
        With ``folder``, an absolute path that all servers see, it saves them in a new folder there
        instead, and the others load them; the new folder is deleted afterwards, unless
        ``keeps_folder``. Both servers go on decoding, and the digests are compared.

        Servers that are behind are told so first, and take no new requests until they are not.
        The fleet's version is ``weight_version``, or the one of more than half of the servers that
        answer and were updated. Raises ``VersionUnclear`` if there is none. The report has every
        server; those that could not be brought are among its failures.
        """
        for left in reversed(range(_ROUNDS)):
            found = await self.status()
            version = find_version(found.answers, weight_version)
            report = Report[CaughtUp]("catch up", failures=dict(found.failures))
            by_layout = await self._tell(found, version, report)
            for layout, behind in by_layout.items():
                late = {url: found.answers[url] for url in behind}
                peers = peers_of(found.answers, version, layout)
                if folder is None:
                    await self._send_between(late, peers, version, report)
                    continue
                path = os.path.join(folder, f"served-{uuid.uuid4().hex}")
                await self._bring(late, peers, version, path, report, keeps_folder=keeps_folder)
            if not left or not await self._has_moved_on(version, weight_version, report):
                break
        self.left_out -= report.answers.keys()
        return report

    async def _tell(
        self, found: Report[Status], version: FleetsVersion, report: Report[CaughtUp]
    ) -> dict[str, list[str]]:
        """Tell the servers that are behind. Return them, by layout.

        A server that has committed since its status is not told: all of them would be behind if a
        trainer's update came in between.
        """
        behind = {url for url, s in found.answers.items() if not version.is_served_by(s)}
        told_before = {url for url, status in found.answers.items() if status.behind is not None}

        async def tell(server: AsyncClient) -> Expected:
            status = found.answers[server.url]
            if server.url not in behind:
                return await server.expect_version(epoch=status.epoch)
            return await server.expect_version(
                version.weight_version,
                digest=version.first_digest(status.layout),
                epoch=status.epoch,
            )

        told = Report[Expected]("catch up")
        await self._everywhere(told, tell, behind | told_before)
        report.failures |= told.failures
        by_layout: dict[str, list[str]] = {}
        for url, status in found.answers.items():
            if url in behind & told.answers.keys():
                by_layout.setdefault(status.layout, []).append(url)
            elif url not in report.failures:
                report.answers[url] = CaughtUp(
                    weight_version=status.weight_version, digest=status.digest
                )
        return by_layout

    async def _bring(
        self,
        behind: dict[str, Status],
        peers: list[str],
        version: FleetsVersion,
        path: str,
        report: Report[CaughtUp],
        *,
        keeps_folder: bool,
    ) -> None:
        """Have one of ``peers`` save its weights in ``path``, and the servers ``behind`` load them.

        All servers have the same layout.
        """
        why: Exception = _no_peer(version)
        peer = None
        for url in peers:
            try:
                await self._client(url).save_served_weights(
                    path, expected_version=version.weight_version
                )
            except (InflightError, httpx.HTTPError) as error:
                why = error
            else:
                peer = url
                break
        if peer is None:
            report.failures |= dict.fromkeys(behind, why)
            return

        async def load(server: AsyncClient) -> CaughtUp:
            receipt = await server.update_from_disk(
                path, load_format=SERVED, **_of_late(behind[server.url])
            )
            return _caught_up(receipt, peer)

        try:
            await self._everywhere(report, load, behind)
        finally:
            if not keeps_folder:
                await self._discard(self._client(peer), path)

    async def _send_between(
        self,
        behind: dict[str, Status],
        peers: list[str],
        version: FleetsVersion,
        report: Report[CaughtUp],
    ) -> None:
        """Have ``peers`` send their weights to the servers ``behind``, over the network.

        A peer sends to one server after the other, so each server asks another peer first. If a
        peer fails, the next one sends. All servers have the same layout.
        """
        places = {url: place for place, url in enumerate(behind)}

        async def bring(server: AsyncClient) -> CaughtUp:
            why: Exception = _no_peer(version)
            for at in range(len(peers)):
                peer = peers[(places[server.url] + at) % len(peers)]
                try:
                    async with self._offered(peer, version) as offered:
                        fields = _of_late(behind[server.url])
                        receipt = await server.update_from_peer(offered, **fields)
                except Refused as error:
                    # nothing has changed
                    why = error
                else:
                    return _caught_up(receipt, peer)
            raise why

        await self._everywhere(report, bring, behind)

    @asynccontextmanager
    async def _offered(self, url: str, version: FleetsVersion) -> AsyncIterator[Offered]:
        """Have a peer offer its weights for the block. Raises ``Conflict`` if it does not."""
        peer = self._client(url)
        try:
            offered = await peer.offer_served_weights(expected_version=version.weight_version)
        except (InflightError, httpx.HTTPError) as error:
            raise Conflict(f"{url}: {error or type(error).__name__}") from error
        try:
            yield offered
        finally:
            await self._withdraw(peer, offered)

    async def _withdraw(self, server: AsyncClient, offered: Offered) -> None:
        with anyio.move_on_after(INTERRUPTED_S, shield=True):
            try:
                await server.withdraw_served_weights(offered.offer_id)
            except (InflightError, httpx.HTTPError) as error:
                logger.warning("%s goes on with its offer: %s", server.url, error)

    async def _discard(self, server: AsyncClient, path: str) -> None:
        with anyio.move_on_after(INTERRUPTED_S, shield=True):
            try:
                await server.discard_saved_weights(path)
            except (InflightError, httpx.HTTPError) as error:
                logger.warning("%s is left behind: %s", path, error)

    async def _has_moved_on(
        self, version: FleetsVersion, wanted: str | None, report: Report[CaughtUp]
    ) -> bool:
        """Return whether the fleet serves another version now, by a trainer's update."""
        was_brought = any(answer.receipt is not None for answer in report.answers.values())
        if wanted is not None or not (report.failures or was_brought):
            return False
        now = await self.status()
        try:
            return find_version(now.answers).weight_version != version.weight_version
        except VersionUnclear:
            return False

    def _client(self, url: str) -> AsyncClient:
        return next(server for server in self.servers if server.url == url)

    # ---- how -------------------------------------------------------------------------

    @asynccontextmanager
    async def _two_phases(
        self,
        /,
        *,
        weight_version: str | None = None,
        kv_cache: KVPolicy | None = None,
        kv_max_age: int | None = None,
        on_busy: OnBusy = "refuse",
        expected_digest: str | None = None,
        **fields: Any,
    ) -> AsyncIterator[Report[Receipt]]:
        report = Report[Receipt]("commit")
        found = Report[Status]("status")
        async with ContextGroup() as blocks:

            async def begin(server: AsyncClient) -> Begun:
                status = found.answers[server.url] = await server.status()
                if status.draining is not None:
                    raise Conflict(status.draining)
                block = server.opened(on_busy=on_busy, **fields)
                return await blocks.enter(server.url, block)

            async def end(server: AsyncClient) -> Receipt:
                return await server.end(
                    weight_version=weight_version, kv_cache=kv_cache, kv_max_age=kv_max_age
                )

            async def seal(server: AsyncClient) -> StagedSoFar:
                return await server.seal(expected_digest=expected_digest)

            await self._all_or_none("begin", begin)
            yield report
            await self._all_or_none("seal", seal)
            staying = [server.url for server in self.taking_part]
            await self._commit(report, end, _prefill_first(found, staying))
            await self._excuse_draining(report)
            _require_one_side(report)

    async def _excuse_draining(self, report: Report[A]) -> None:
        """Leave out servers that refused because they drain, unless all do.

        A silent server is not asked again: the caller would wait for it twice.
        """
        refused = {u for u, error in report.failures.items() if isinstance(error, Refused)}
        if not refused:
            return
        found = await self._everywhere(Report("status"), AsyncClient.status, refused)
        leaving = {url for url, s in found.answers.items() if s.draining is not None}
        if not leaving or leaving >= {server.url for server in self.taking_part}:
            return
        self.leave_out(leaving)
        for url in leaving:
            logger.warning("%s takes no part any more: %s", url, report.failures.pop(url))

    async def _commit(
        self,
        report: Report[Receipt],
        end: Callable[[AsyncClient], Awaitable[Receipt]],
        turns: list[list[str]],
    ) -> None:
        """Commit on all servers. A cancellation first waits ``INTERRUPTED_S`` for the end."""
        task = asyncio.create_task(self._one_turn_after_the_other(report, end, turns))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await asyncio.wait({task}, timeout=INTERRUPTED_S)
                task.cancel()
                await asyncio.wait({task})
            if report.failures:
                logger.error("A commit was interrupted: %s", FleetSplit(report))
            raise

    async def _one_turn_after_the_other(
        self,
        report: Report[Receipt],
        call: Callable[[AsyncClient], Awaitable[Receipt]],
        turns: list[list[str]],
    ) -> None:
        for turn in turns:
            if report.failures:
                why = f"was not asked to, because {', '.join(report.failures)} failed"
                report.failures |= dict.fromkeys(turn, Conflict(why))
            else:
                await self._everywhere(report, call, turn)

    async def _stage(self, source: Source, **fields: Any) -> Report[Receipt | StagedSoFar]:
        async def stage(server: AsyncClient) -> Receipt | StagedSoFar:
            return await server.update(source, **fields)

        return await self._all_or_none("stage", stage)

    async def _all_or_none(
        self, phase: Phase, call: Callable[[AsyncClient], Awaitable[A]]
    ) -> Report[A]:
        """Run a phase before the commit, and raise ``FleetRefused`` if a server failed."""
        report = await self._everywhere(Report(phase), call)
        await self._excuse_draining(report)
        _require_all(report)
        return report

    async def _everywhere(
        self,
        report: Report[A],
        call: Callable[[AsyncClient], Awaitable[A]],
        only: Collection[str] | None = None,
    ) -> Report[A]:
        """Call each server of ``only``, by default those that take part. Fill ``report``."""

        async def attempt(server: AsyncClient) -> None:
            try:
                report.answers[server.url] = await call(server)
            except (InflightError, httpx.HTTPError) as error:
                report.failures[server.url] = error
            except asyncio.CancelledError:
                report.failures[server.url] = NoAnswer("it was interrupted before its answer")
                raise

        urls = {server.url for server in self.taking_part} if only is None else only
        await together(attempt(server) for server in self.servers if server.url in urls)
        return report


def _prefill_first(found: Report[Status], urls: Collection[str] | None = None) -> list[list[str]]:
    """Return ``urls``, by default all answering servers, in turns: prefill servers first."""
    urls = list(found.answers) if urls is None else urls
    prefill = [u for u in urls if u in found.answers and found.answers[u].role == "prefill"]
    return [turn for turn in (prefill, [u for u in urls if u not in prefill]) if turn]


def _no_peer(version: FleetsVersion) -> Conflict:
    return Conflict(f"no server of the same layout serves {version.weight_version!r}")


def _of_late(status: Status) -> UpdateOptions:
    """Return the fields of an update that brings a server to the fleet's version."""
    return {
        # a trainer may have brought it a later version by now
        "expected_version": status.weight_version,
        # and it must not become a piece of the trainer's session
        "on_busy": "refuse",
    }


def _caught_up(receipt: Receipt | StagedSoFar, peer: str | None) -> CaughtUp:
    assert isinstance(receipt, Receipt)
    return CaughtUp(
        weight_version=receipt.weight_version,
        digest=receipt.ranks[0].digest,
        peer=peer,
        receipt=receipt,
    )


def _require_all(report: Report[A]) -> None:
    if report.failures:
        raise FleetRefused(report)


def _require_one_side(report: Report[Receipt]) -> None:
    if report.failures:
        split = report.answers or report.uncertain
        raise FleetSplit(report) if split else FleetRefused(report)
