"""One server, as a trainer with an event loop sees it."""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Literal

import anyio
import httpx

from sglang_inflight.client.answers import (
    A,
    Heard,
    Json,
    hear,
    read_answer,
    read_json,
    says_inactive,
)
from sglang_inflight.client.progress import OnProgress, Progress
from sglang_inflight.client.repeat import repeating
from sglang_inflight.client.session import Session
from sglang_inflight.client.unheard import NoAnswer
from sglang_inflight.errors import InflightError, NotOffered
from sglang_inflight.grants import Grant, MemoryMoved, Release
from sglang_inflight.receipt import Begun, Receipt, StagedSoFar
from sglang_inflight.status import Status

logger = logging.getLogger(__name__)

Source = Literal["disk", "tensor", "distributed", "ipc"]

# of a pause or a session, if nobody says otherwise; renewed three times as often
LEASE_S = 30.0
# how often a callback hears of the progress
PROGRESS_S = 0.25
# how long to try to let go of what the server lets go of by itself, when its lease ends
CLEANUP_S = 5.0
# attempts at a call, where another one can do no harm
ATTEMPTS = 3
_STATUS = "/inflight/status"
# How long the question may take whether a server runs with us. One without us answers at once.
ASK_S = 10.0

# Longer than a server waits for a step of its ranks (120 s), so that it is the server who
# says which rank was silent.
TIMEOUT_S = 150.0
# What an update may take besides where nobody says otherwise, and what a pause may that
# waits for requests: the server's own limits.
UPDATE_S = 600.0
DRAIN_S = 86_400.0

# ``_call`` bounds the whole of a call, and a body may take its time.
_TIMEOUT = httpx.Timeout(10.0, read=None, write=None)
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


class AsyncClient:
    """Calls of one server. Belongs to the event loop that it is first used on.

    Each method raises what the server raised, with its sentence: ``Refused`` or a child of
    it where nothing has changed, ``OutcomeUnknown`` and ``HalfDone`` where something has or
    may have. An answer that did not come in time (``NoAnswer``) or is none (``WrongAnswer``)
    is an ``OutcomeUnknown``, too. ``httpx.HTTPError`` is what broke on the way.

    What is tried again, by itself: every call whose connection was never made, because the
    server has not heard of it. Beyond that, where the connection broke, only the calls
    that do the same when done twice: ``status``, ``loads``, ``seal``, taking or renewing a
    pause, opening or renewing a session. The others may have been done or not: an update
    could be undone by a second one, and letting go twice says that it was lost. ``status``
    tells.

    No call is without an end: each may take ``timeout_s``, and what its own fields give it
    besides.

    Before its first call that is to change something, a client asks for the status: a server
    without SGLang Inflight would pass over the fields that only that knows, and update its
    weights under requests that are held up. It is ``NotOffered`` instead, and nothing is sent.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """``api_key`` is the server's ``--admin-api-key``, or its ``--api-key``.

        ``timeout_s`` is how long an answer may take that waits for no more than a step of
        the server's ranks. A call that may wait for more may take that much longer: an
        update its ``timeout_s`` (600 s if not given), a pause in the mode ``wait`` its own
        (a day if not given). Renewing a lease may take half of the lease.
        """
        self.url = url
        self.timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        transport = httpx.AsyncHTTPTransport(
            # certificates take longer to read than a call takes, and a fleet has many clients
            verify=httpx.URL(url).scheme == "https",
            retries=ATTEMPTS - 1,
            socket_options=_NOTICE_DEATH,
            limits=_LIMITS,
        )
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=_TIMEOUT, transport=transport
        )
        self._session_id: str | None = None
        self._is_sealed = False
        self._runs_with_us = False

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def status(self) -> Status:
        """State, holders, versions and staging, and the same of each rank."""
        return self._read(Status, await self._call("GET", _STATUS, attempts=ATTEMPTS))

    async def loads(self) -> Json:
        """SGLang's own ``/v1/loads``: requests and tokens, of each replica."""
        return await self._call("GET", "/v1/loads?include=core", attempts=ATTEMPTS)

    # ---- pauses ----------------------------------------------------------------------

    async def pause(
        self,
        mode: str | None = None,
        *,
        pause_id: str | None = None,
        new_id: str | None = None,
        lease_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Grant:
        """Pause generation, or renew the pause ``pause_id``; see ``paused`` first.

        ``new_id`` is the id that a new pause is to have. A caller who chooses it can let go
        of the pause without having heard the answer.
        """
        patience = self.timeout_s
        if pause_id is None:
            # its own, so that a second attempt finds what the first may have taken
            new_id = new_id or uuid.uuid4().hex
        if mode == "wait":
            patience += timeout_s or DRAIN_S
        granted = await self._post(
            "/pause_generation",
            attempts=ATTEMPTS,
            patience_s=patience,
            mode=mode,
            pause_id=pause_id,
            new_id=new_id,
            lease_s=lease_s,
            timeout_s=timeout_s,
        )
        return self._read(Grant, granted)

    async def resume(self, pause_id: str | None = None) -> Release:
        """Let go of one pause, or of all."""
        return self._read(Release, await self._post("/continue_generation", pause_id=pause_id))

    @asynccontextmanager
    async def paused(
        self, mode: str = "in_place", *, lease_s: float = LEASE_S, timeout_s: float | None = None
    ) -> AsyncIterator[Grant]:
        """Paused for the time of the block, and no longer than that.

        The pause is renewed in the background. Where this process dies, or the network
        does, the lease runs out and the server generates again. Raises ``Conflict`` at the
        end of the block where the pause was lost meanwhile.
        """
        pause_id = uuid.uuid4().hex

        async def renew() -> None:
            await self._post(
                "/pause_generation",
                attempts=ATTEMPTS,
                patience_s=lease_s / 2,
                pause_id=pause_id,
                lease_s=lease_s,
            )

        async with self._held("/continue_generation", pause_id=pause_id):
            answer = await self.pause(mode, new_id=pause_id, lease_s=lease_s, timeout_s=timeout_s)
            async with repeating(f"Renewing a pause of {self.url}", renew, lease_s / 3):
                yield answer
            await self.resume(pause_id)

    # ---- updates ---------------------------------------------------------------------

    async def update(
        self, /, source: Source, *, on_progress: OnProgress | None = None, **fields: Any
    ) -> Receipt | StagedSoFar:
        """Stage weights while the server generates, and commit them: the receipt.

        Inside ``session`` they are staged only. ``fields`` are those of SGLang's
        ``/update_weights_from_…`` and of the table in docs/api.md; running requests keep their KV
        unless ``flush_cache`` or ``kv_cache`` says otherwise. ``on_progress`` is called
        from the event loop a few times a second.
        """
        body = {"non_blocking": True, "flush_cache": False, **fields}
        async with self._reporting(on_progress):
            answer = await self._post(
                f"/update_weights_from_{source}",
                patience_s=self.timeout_s + (fields.get("timeout_s") or UPDATE_S),
                session_id=self._session_id,
                **body,
            )
        # it may also be a piece of somebody's session, which was begun in SGLang's own way
        if "base_version" in answer:
            return self._read(Receipt, answer)
        return self._read(StagedSoFar, answer)

    async def update_from_disk(
        self, /, model_path: str, *, weight_version: str | None = None, **fields: Any
    ) -> Receipt | StagedSoFar:
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
        kv_cache: str | None = None,
        lease_s: float = LEASE_S,
        on_progress: OnProgress | None = None,
        **fields: Any,
    ) -> AsyncIterator[Session]:
        """Updates sent in the block go live together at its end.

        What is yielded has the ``receipt`` once the block has ended; before that it has the
        ``session_id``, for a trainer that sends by other means. Where the block raises, or
        this process dies, the session is dropped and nothing changed. ``kv_cache`` has the
        last word; None leaves it to the updates. ``fields`` are those of
        ``/begin_weight_update``. A client has one session at a time.
        """
        async with self.opened(lease_s=lease_s, on_progress=on_progress, **fields) as begun:
            session = Session(begun)
            yield session
            session.receipt = await self.end(weight_version=weight_version, kv_cache=kv_cache)

    @asynccontextmanager
    async def opened(
        self,
        /,
        *,
        lease_s: float = LEASE_S,
        on_progress: OnProgress | None = None,
        **fields: Any,
    ) -> AsyncIterator[Begun]:
        """A session whose lease is renewed until the block ends; the block ends it itself.

        It is dropped where the block raises.
        """
        session_id = uuid.uuid4().hex

        async def renew() -> None:
            await self._post(
                "/begin_weight_update",
                attempts=ATTEMPTS,
                patience_s=lease_s / 2,
                session_id=session_id,
            )

        try:
            async with self._held("/abort_weight_update", session_id=session_id):
                begun = await self._post(
                    "/begin_weight_update",
                    attempts=ATTEMPTS,
                    patience_s=self.timeout_s + self._turn_s(fields),
                    non_blocking=True,
                    new_id=session_id,
                    lease_s=lease_s,
                    **fields,
                )
                self._session_id, self._is_sealed = session_id, False
                async with (
                    repeating(f"Renewing a session of {self.url}", renew, lease_s / 3),
                    self._reporting(on_progress),
                ):
                    yield self._read(Begun, begun)
        finally:
            self._session_id = None

    async def seal(self) -> StagedSoFar:
        """Check what the open session has staged, on every rank; it cannot fail after that."""
        answer = await self._post(
            "/seal_weight_update",
            attempts=ATTEMPTS,
            patience_s=self.timeout_s + UPDATE_S,
            session_id=self._session_id,
        )
        self._is_sealed = True
        return self._read(StagedSoFar, answer)

    async def end(
        self, *, weight_version: str | None = None, kv_cache: str | None = None
    ) -> Receipt:
        """Seal the open session, where that is not done, and commit it."""
        receipt = await self._post(
            "/end_weight_update",
            patience_s=self.timeout_s + (0.0 if self._is_sealed else UPDATE_S),
            non_blocking=True,
            session_id=self._session_id,
            weight_version=weight_version,
            kv_cache=kv_cache,
        )
        return self._read(Receipt, receipt)

    async def join_group(self, **fields: Any) -> None:
        """Let every rank join a trainer's process group; see ``Sender`` first.

        ``fields`` are those of SGLang's ``/init_weights_update_group``. It is answered when
        the group is formed.
        """
        await self._post("/init_weights_update_group", **fields)

    async def leave_group(self, group_name: str) -> None:
        """Let every rank leave a trainer's process group."""
        await self._post("/destroy_weights_update_group", group_name=group_name)

    async def roll_back(
        self, *, weight_version: str | None = None, expected_version: str | None = None
    ) -> Receipt:
        """Return to the version before the last commit.

        With ``expected_version``, the version that is to be undone, it is refused where
        another one is serving: then a rollback can be asked for again.
        """
        receipt = await self._post(
            "/inflight/rollback",
            weight_version=weight_version,
            expected_version=expected_version,
        )
        return self._read(Receipt, receipt)

    async def release_memory(
        self, *tags: str, keep_weights: Literal["host", "discard"] | None = None
    ) -> MemoryMoved:
        """Give memory back while requests wait: pause with ``retract`` first.

        ``tags`` are of ``kv_cache``, ``weights`` and ``cuda_graph``; none are all of them.
        Weights come back as they were (``host``), or have to be sent again (``discard``).
        """
        moved = await self._post(
            "/release_memory_occupation",
            patience_s=self.timeout_s + UPDATE_S,
            tags=list(tags),
            keep_weights=keep_weights,
        )
        return self._read(MemoryMoved, moved)

    async def resume_memory(self, *tags: str) -> MemoryMoved:
        """Take memory of ``tags`` again, or all of it. With the last generation goes on."""
        moved = await self._post(
            "/resume_memory_occupation", patience_s=self.timeout_s + UPDATE_S, tags=list(tags)
        )
        return self._read(MemoryMoved, moved)

    # ---- how -------------------------------------------------------------------------

    def _reporting(self, on_progress: OnProgress | None) -> AbstractAsyncContextManager[None]:
        if on_progress is None:
            return nullcontext()

        async def look() -> None:
            on_progress(Progress.read(self.url, await self.status()))

        return repeating(f"Looking at the progress of {self.url}", look, PROGRESS_S)

    @staticmethod
    def _turn_s(fields: dict[str, Any]) -> float:
        """How long a call may wait for the updates before it."""
        if fields.get("on_busy", "wait") != "wait":
            return 0.0
        return fields.get("timeout_s") or UPDATE_S

    @asynccontextmanager
    async def _held(self, path: str, **names: Any) -> AsyncIterator[None]:
        """Let go by ``path`` where the block fails, whether or not it was taken by then.

        After a failure, which tells more than any answer to this; the lease does it too.
        """
        try:
            yield
        except BaseException:
            with anyio.move_on_after(CLEANUP_S, shield=True):
                try:
                    await self._post(path, **names)
                except (InflightError, httpx.HTTPError) as error:
                    logger.info("%s%s: %r", self.url, path, error)
            raise

    def _read(self, shape: type[A], body: Json) -> A:
        return read_answer(self.url, body, shape)

    async def _post(
        self, path: str, *, attempts: int = 1, patience_s: float | None = None, **body: Any
    ) -> Json:
        given = {name: value for name, value in body.items() if value is not None}
        return await self._call("POST", path, given, attempts=attempts, patience_s=patience_s)

    async def _call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        attempts: int,
        patience_s: float | None = None,
    ) -> Json:
        """Raises ``NoAnswer`` after ``patience_s`` seconds, over all ``attempts``."""
        patience_s = patience_s or self.timeout_s
        try:
            async with asyncio.timeout(patience_s):
                if method == "POST" and not self._runs_with_us:
                    await self._require_us()
                heard = await self._send(method, path, body, attempts)
        except TimeoutError as error:
            raise NoAnswer(f"{self.url}{path} did not answer within {patience_s:g} s") from error
        if path == _STATUS:
            self._take_note(heard)
        return read_json(heard)

    async def _require_us(self) -> None:
        """Raises ``NotOffered`` where the server says that it runs without us.

        Where it says nothing, the call itself does, and the next one asks again.
        """
        try:
            async with asyncio.timeout(ASK_S):
                heard = await self._send("GET", _STATUS, None, 1)
        except (TimeoutError, httpx.HTTPError) as error:
            logger.info("%s%s: %r", self.url, _STATUS, error)
            return
        self._take_note(heard)

    def _take_note(self, status: Heard) -> None:
        if (why := says_inactive(status)) is not None:
            raise NotOffered(why)
        self._runs_with_us = self._runs_with_us or status.response.is_success

    async def _send(self, method: str, path: str, body: Json | None, attempts: int) -> Heard:
        for _ in range(attempts - 1):
            try:
                return await self._send_once(method, path, body)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                # the transport has tried again
                raise
            except httpx.TransportError as error:
                logger.info("%s%s, trying again: %r", self.url, path, error)
                await asyncio.sleep(0.1)
        return await self._send_once(method, path, body)

    async def _send_once(self, method: str, path: str, body: Json | None) -> Heard:
        async with self._http.stream(method, path, json=body) as response:
            return await hear(response)
