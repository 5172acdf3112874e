"""One server, as a trainer with an event loop sees it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Literal

import anyio
import httpx

from sglang_inflight.client.progress import OnProgress, Progress
from sglang_inflight.client.repeat import repeating
from sglang_inflight.errors import Conflict, RankSilent, Refused

logger = logging.getLogger(__name__)

Answer = dict[str, Any]
Source = Literal["disk", "tensor", "distributed", "ipc"]

# of a pause or a session, if nobody says otherwise; renewed three times as often
LEASE_S = 30.0
# how often a callback hears of the progress
PROGRESS_S = 0.25
# how long to try to let go of what the server lets go of by itself, when its lease ends
CLEANUP_S = 5.0
# attempts at a call, where another one can do no harm
ATTEMPTS = 3

# A pause waits for a step, an update for its staging: the server bounds both.
_TIMEOUT = httpx.Timeout(10.0, read=None)
# And a machine that vanished is noticed by TCP, in half a minute.
_NOTICE_DEATH = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
]
# Sooner than the server (5 s), or a call could meet a connection that is just being closed.
_LIMITS = httpx.Limits(keepalive_expiry=2.0)
_ERRORS: dict[int, type[Refused]] = {400: Refused, 409: Conflict, 504: RankSilent}


class AsyncClient:
    """Calls of one server. Belongs to the event loop that it is first used on.

    Each method raises ``Refused``, ``Conflict`` (409) or ``RankSilent`` (504) with the
    server's sentence where it refused, and ``httpx.HTTPError`` where it was not reached or
    answered something else.

    What is tried again, by itself: every call whose connection was never made, because the
    server has not heard of it. Beyond that, where the connection broke, only the calls
    that do the same when done twice: ``status``, ``loads``, ``seal``, renewing a lease. The others
    may have been done or not: an update could be undone by a second one, a pause could be
    taken twice, and letting go twice says that it was lost. ``status`` tells.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """``api_key`` is the server's ``--admin-api-key``, or its ``--api-key``."""
        self.url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        transport = httpx.AsyncHTTPTransport(
            retries=ATTEMPTS - 1, socket_options=_NOTICE_DEATH, limits=_LIMITS
        )
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=_TIMEOUT, transport=transport
        )
        self._session_id: str | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def status(self) -> Answer:
        """State, holders, versions and staging, and the same of each rank."""
        return await self._call("GET", "/inflight/status", attempts=ATTEMPTS)

    async def loads(self) -> Answer:
        """SGLang's own ``/v1/loads``: requests and tokens, of each replica."""
        return await self._call("GET", "/v1/loads?include=core", attempts=ATTEMPTS)

    # ---- pauses ----------------------------------------------------------------------

    async def pause(
        self,
        mode: str | None = None,
        *,
        pause_id: str | None = None,
        lease_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Pause generation, or renew the pause ``pause_id``; see ``paused`` first."""
        return await self._post(
            "/pause_generation",
            attempts=1 if pause_id is None else ATTEMPTS,
            mode=mode,
            pause_id=pause_id,
            lease_s=lease_s,
            timeout_s=timeout_s,
        )

    async def resume(self, pause_id: str | None = None) -> Answer:
        """Let go of one pause, or of all."""
        return await self._post("/continue_generation", pause_id=pause_id)

    @asynccontextmanager
    async def paused(
        self, mode: str = "in_place", *, lease_s: float = LEASE_S, timeout_s: float | None = None
    ) -> AsyncIterator[Answer]:
        """Paused for the time of the block, and no longer than that.

        The pause is renewed in the background. Where this process dies, or the network
        does, the lease runs out and the server generates again. Raises ``Conflict`` at the
        end of the block where the pause was lost meanwhile.
        """
        answer = await self.pause(mode, lease_s=lease_s, timeout_s=timeout_s)
        pause_id: str = answer["pause_id"]

        async def renew() -> None:
            await self.pause(pause_id=pause_id, lease_s=lease_s)

        try:
            async with repeating(f"Renewing a pause of {self.url}", renew, lease_s / 3):
                yield answer
        except BaseException:
            await self._let_go("/continue_generation", pause_id=pause_id)
            raise
        await self.resume(pause_id)

    # ---- updates ---------------------------------------------------------------------

    async def update(
        self, /, source: Source, *, on_progress: OnProgress | None = None, **fields: Any
    ) -> Answer:
        """Stage weights while the server generates, and commit them: the receipt.

        Inside ``session`` they are staged only. ``fields`` are those of SGLang's
        ``/update_weights_from_…`` and of the README's table; running requests keep their KV
        unless ``flush_cache`` or ``kv_cache`` says otherwise. ``on_progress`` is called
        from the event loop a few times a second.
        """
        body = {"non_blocking": True, "flush_cache": False, **fields}
        async with self._reporting(on_progress):
            return await self._post(
                f"/update_weights_from_{source}", session_id=self._session_id, **body
            )

    async def update_from_disk(
        self, /, model_path: str, *, weight_version: str | None = None, **fields: Any
    ) -> Answer:
        """``update`` from a checkpoint's folder, as the server sees it."""
        return await self.update(
            "disk", model_path=model_path, weight_version=weight_version, **fields
        )

    @asynccontextmanager
    async def session(
        self,
        /,
        *,
        weight_version: str | None = None,
        kv_cache: str = "fence",
        lease_s: float = LEASE_S,
        on_progress: OnProgress | None = None,
        **fields: Any,
    ) -> AsyncIterator[Answer]:
        """Updates sent in the block go live together at its end.

        The yielded dict is the receipt, once the block has ended; before that it has the
        ``session_id``, for a trainer that sends by other means. Where the block raises, or
        this process dies, the session is dropped and nothing changed. ``fields`` are those
        of ``/begin_weight_update``. A client has one session at a time.
        """
        async with self.opened(lease_s=lease_s, on_progress=on_progress, **fields) as receipt:
            yield receipt
            receipt |= await self.end(weight_version=weight_version, kv_cache=kv_cache)

    @asynccontextmanager
    async def opened(
        self,
        /,
        *,
        lease_s: float = LEASE_S,
        on_progress: OnProgress | None = None,
        **fields: Any,
    ) -> AsyncIterator[Answer]:
        """A session whose lease is renewed until the block ends; the block ends it itself.

        It is dropped where the block raises.
        """
        begun = await self._post(
            "/begin_weight_update", non_blocking=True, lease_s=lease_s, **fields
        )
        session_id = self._session_id = begun["session_id"]

        async def renew() -> None:
            await self._post("/begin_weight_update", attempts=ATTEMPTS, session_id=session_id)

        try:
            async with (
                repeating(f"Renewing a session of {self.url}", renew, lease_s / 3),
                self._reporting(on_progress),
            ):
                yield begun
        except BaseException:
            await self._let_go("/abort_weight_update", session_id=session_id)
            raise
        finally:
            self._session_id = None

    async def seal(self) -> Answer:
        """Check what the open session has staged, on every rank; it cannot fail after that."""
        return await self._post(
            "/seal_weight_update", attempts=ATTEMPTS, session_id=self._session_id
        )

    async def end(
        self, *, weight_version: str | None = None, kv_cache: str | None = None
    ) -> Answer:
        """Seal the open session, where that is not done, and commit it: the receipt."""
        return await self._post(
            "/end_weight_update",
            non_blocking=True,
            session_id=self._session_id,
            weight_version=weight_version,
            kv_cache=kv_cache,
        )

    async def roll_back(self, *, weight_version: str | None = None) -> Answer:
        """Return to the version before the last commit."""
        return await self._post("/inflight/rollback", weight_version=weight_version)

    # ---- how -------------------------------------------------------------------------

    def _reporting(self, on_progress: OnProgress | None) -> AbstractAsyncContextManager[None]:
        if on_progress is None:
            return nullcontext()

        async def look() -> None:
            on_progress(Progress.read(self.url, await self.status()))

        return repeating(f"Looking at the progress of {self.url}", look, PROGRESS_S)

    async def _let_go(self, path: str, **body: Any) -> None:
        """After a failure, which tells more than any answer to this; the lease does it too."""
        with anyio.move_on_after(CLEANUP_S, shield=True):
            try:
                await self._post(path, **body)
            except (Refused, httpx.HTTPError) as error:
                logger.info("%s%s: %r", self.url, path, error)

    async def _post(self, path: str, *, attempts: int = 1, **body: Any) -> Answer:
        given = {name: value for name, value in body.items() if value is not None}
        return await self._call("POST", path, given, attempts=attempts)

    async def _call(
        self, method: str, path: str, body: Answer | None = None, *, attempts: int
    ) -> Answer:
        response = await self._send(method, path, body, attempts)
        error = _ERRORS.get(response.status_code)
        if error is not None:
            refusal = error(_read_message(response))
            refusal.add_note(f"{method} {response.url}")
            raise refusal
        response.raise_for_status()
        answer: Answer = response.json()
        return answer

    async def _send(
        self, method: str, path: str, body: Answer | None, attempts: int
    ) -> httpx.Response:
        for _ in range(attempts - 1):
            try:
                return await self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                logger.info("%s%s, trying again: %r", self.url, path, error)
                await asyncio.sleep(0.1)
        return await self._http.request(method, path, json=body)


def _read_message(response: httpx.Response) -> str:
    try:
        return str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        return response.text
