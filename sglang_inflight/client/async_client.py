"""Client of one server, for an event loop."""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Literal, Unpack

import anyio
import httpx

from sglang_inflight.client.aio import repeating
from sglang_inflight.client.answers import (
    A,
    Json,
    NoAnswer,
    Reply,
    Session,
    read_answer,
    read_json,
    read_reply,
    say_why,
    says_inactive,
    says_other_version,
)
from sglang_inflight.client.connections import Transport
from sglang_inflight.client.fields import (
    BeginFields,
    DiskOptions,
    OnProgress,
    Progress,
    UpdateFields,
    UpdateOptions,
)
from sglang_inflight.client.layouts import SentLayouts
from sglang_inflight.vocabulary.answers import (
    Begun,
    Drained,
    Expected,
    Grant,
    MemoryMoved,
    NewRequests,
    Offered,
    PauseMode,
    Receipt,
    Release,
    Saved,
    Served,
    StagedSoFar,
    Status,
    WorkerEntry,
)
from sglang_inflight.vocabulary.bodies import DEFAULT_GROUP, KeepWeights
from sglang_inflight.vocabulary.calls import TABLE
from sglang_inflight.vocabulary.errors import InflightError, NotOffered
from sglang_inflight.vocabulary.kept_kv import KVPolicy

logger = logging.getLogger(__name__)

Source = Literal["disk", "tensor", "distributed", "ipc", "peer"]

# default lease of pauses and sessions; renewed every third of the lease
LEASE_S = 30.0
# period of progress callbacks
PROGRESS_S = 0.25
# time limit for releasing a pause or session after a failure; afterwards its lease does it
CLEANUP_S = 5.0
# attempts at idempotent calls
ATTEMPTS = 3
_STATUS, _WORKER = "/inflight/status", "/inflight/worker"
# time limit for checking whether a server runs with us; one without us answers at once
ASK_S = 10.0

# longer than a server waits for its ranks' step (120 s), so that the server can name the silent
# rank
TIMEOUT_S = 150.0
# the server's own defaults for an update, and for a pause with mode "wait"
UPDATE_S = 600.0
DRAIN_S = 86_400.0

# no limit on reads and writes: ``_call`` bounds the whole call
_TIMEOUT = httpx.Timeout(10.0, read=None, write=None)
# shorter than the server's 5 s, or a call could use a connection while the server closes it
LIMITS = httpx.Limits(keepalive_expiry=2.0)


class AsyncClient:
    """Calls to one server. Belongs to the event loop of its first use.

    Each method raises the server's error with its message. After ``Refused`` or a child of it
    nothing has changed. After ``HalfDone`` something has, and after ``OutcomeUnknown`` something
    may have. A late answer (``NoAnswer``) and an unreadable one (``WrongAnswer``) are
    ``OutcomeUnknown``, too. A broken connection raises ``httpx.HTTPError``.

    Retries are automatic. Every call is retried while no connection was made: the server has not
    seen the call. After a broken connection only idempotent calls are retried: ``status``,
    ``loads``, ``wait_for``, ``seal``, taking or renewing a pause, opening or renewing a session.
    After other calls, ask ``status`` for the outcome: a repeated rollback undoes the first one,
    and releasing a pause twice raises ``Conflict``.

    Every call has a time limit: ``timeout_s`` plus the time in its own fields.

    Before its first ``POST`` a client asks for the status. A server without SGLang Inflight would
    ignore our fields, and hold requests up during an update. A server of another minor version may
    read them in another way. The client raises ``NotOffered`` instead, and sends nothing.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Create a client. ``api_key`` is the server's ``--admin-api-key``, or its ``--api-key``.

        ``timeout_s`` is the time limit of an answer after one step of the server's ranks. Slower
        calls add their own: an update its ``timeout_s`` (default 600 s), a pause with mode
        ``wait`` its ``timeout_s`` (default a day). Renewing a lease may take half of the lease.
        """
        self.url = url
        self.timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        transport = Transport(
            # loading certificates takes longer than a call, and a fleet has many clients
            verify=httpx.URL(url).scheme == "https",
            retries=ATTEMPTS - 1,
            limits=LIMITS,
        )
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=_TIMEOUT, transport=transport
        )
        self._layouts = SentLayouts()
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
        """Return state, holders, versions and staging of the server and of each rank."""
        return self._read(Status, await self._call("GET", _STATUS, attempts=ATTEMPTS))

    async def worker(self) -> WorkerEntry:
        """Return the server's entry for a gateway's list: what it is, serves and can do."""
        return self._read(WorkerEntry, await self._call("GET", _WORKER, attempts=ATTEMPTS))

    async def loads(self) -> Json:
        """Return SGLang's ``/v1/loads``: requests and tokens of each replica."""
        return await self._call("GET", "/v1/loads?include=core", attempts=ATTEMPTS)

    async def plan(self, *, known: Sequence[str] = ()) -> Json:
        """Return what each rank uses of each tensor (docs/guide/sharded.md, "What each rank uses").

        A rank whose digest is ``known`` says no more than that. Raises ``Conflict`` before the
        server's first update.
        """
        query = httpx.QueryParams([("known", digest) for digest in known])
        patience = self.timeout_s + UPDATE_S
        return await self._call(
            "GET", f"/inflight/plan?{query}", attempts=ATTEMPTS, patience_s=patience
        )

    async def wait_for(
        self,
        *,
        epoch: int | None = None,
        weight_version: str | None = None,
        timeout_s: float | None = None,
    ) -> Served:
        """Return what is served, as soon as the epoch is at least ``epoch``.

        With ``weight_version`` also wait for that name. ``timeout_s`` None is the server's default
        (``SGLANG_INFLIGHT_VERSION_TIMEOUT_S``). Raises ``NotServed`` after that time.
        """
        given = {"epoch": epoch, "weight_version": weight_version, "timeout_s": timeout_s}
        query = httpx.QueryParams({key: value for key, value in given.items() if value is not None})
        path = TABLE["wait_for_epoch"].path
        patience = self.timeout_s + (timeout_s or 0.0)
        return self._read(
            Served,
            await self._call("GET", f"{path}?{query}", attempts=ATTEMPTS, patience_s=patience),
        )

    # ---- pauses ----------------------------------------------------------------------

    async def pause(
        self,
        mode: PauseMode | None = None,
        *,
        pause_id: str | None = None,
        new_id: str | None = None,
        lease_s: float | None = None,
        timeout_s: float | None = None,
        new_requests: NewRequests | None = None,
    ) -> Grant:
        """Pause generation, or renew the pause ``pause_id``. Prefer ``paused``.

        ``new_id`` is a new pause's id. A caller choosing it can release the pause even if the
        answer is lost. ``new_requests`` "reject" answers 503 to requests that arrive in the pause;
        "queue" is the default of a new pause.
        """
        patience = self.timeout_s
        if pause_id is None:
            # our own id, so that a retry finds the pause taken by a lost attempt
            new_id = new_id or uuid.uuid4().hex
        if mode == "wait":
            patience += timeout_s or DRAIN_S
        granted = await self._post(
            "pause_generation",
            attempts=ATTEMPTS,
            patience_s=patience,
            mode=mode,
            pause_id=pause_id,
            new_id=new_id,
            lease_s=lease_s,
            timeout_s=timeout_s,
            new_requests=new_requests,
        )
        return self._read(Grant, granted)

    async def resume(self, pause_id: str | None = None) -> Release:
        """Release one pause, or all."""
        return self._read(Release, await self._post("continue_generation", pause_id=pause_id))

    @asynccontextmanager
    async def paused(
        self,
        mode: PauseMode = "in_place",
        *,
        lease_s: float = LEASE_S,
        timeout_s: float | None = None,
        new_requests: NewRequests = "queue",
    ) -> AsyncIterator[Grant]:
        """Pause generation for the duration of the block.

        ``new_requests`` decides about requests that arrive in the pause (see ``pause``).
        A background task renews the pause. If this process or the network dies, the lease expires
        and the server generates again. Raises ``Conflict`` at the end of the block if the pause
        was lost.
        """
        pause_id = uuid.uuid4().hex

        async def renew() -> None:
            await self._post(
                "pause_generation",
                attempts=ATTEMPTS,
                patience_s=lease_s / 2,
                pause_id=pause_id,
                lease_s=lease_s,
            )

        async with self._held("continue_generation", pause_id=pause_id):
            answer = await self.pause(
                mode,
                new_id=pause_id,
                lease_s=lease_s,
                timeout_s=timeout_s,
                new_requests=None if new_requests == "queue" else new_requests,
            )
            async with repeating(f"Renewing a pause of {self.url}", renew, lease_s / 3):
                yield answer
            await self.resume(pause_id)

    # ---- updates ---------------------------------------------------------------------

    async def update(
        self,
        /,
        source: Source,
        *,
        on_progress: OnProgress | None = None,
        **fields: Unpack[UpdateFields],
    ) -> Receipt | StagedSoFar:
        """Stage weights while the server generates, commit them, and return the receipt.

        Inside ``session`` the weights are only staged. ``fields`` are the fields of
        ``/update_weights_from_…`` (docs/guide/updates.md). Running requests keep their KV by
        default; see ``flush_cache`` and ``kv_cache``. The event loop calls ``on_progress`` a few
        times a second.

        Beside ``names``, ``dtypes`` and ``shapes``, ``layout_digest`` saves their repetition: they
        are sent once, and again to a server that does not keep them any more.
        """
        given: Json = {**fields}
        body = {"non_blocking": True, "flush_cache": False, **given}
        send = functools.partial(
            self._post,
            f"update_weights_from_{source}",
            patience_s=self.timeout_s + (fields.get("timeout_s") or UPDATE_S),
            session_id=self._session_id,
        )
        async with self._reporting(on_progress):
            answer = await self._layouts.send(send, body)
        # without base_version the call became a piece of a session begun in SGLang's way
        if "base_version" in answer:
            return self._read(Receipt, answer)
        return self._read(StagedSoFar, answer)

    async def update_from_disk(
        self,
        /,
        model_path: str,
        *,
        weight_version: str | None = None,
        on_progress: OnProgress | None = None,
        **fields: Unpack[DiskOptions],
    ) -> Receipt | StagedSoFar:
        """Call ``update`` with a checkpoint's folder, a path on the server."""
        return await self.update(
            "disk",
            model_path=model_path,
            weight_version=weight_version,
            on_progress=on_progress,
            **fields,
        )

    async def update_from_peer(
        self,
        /,
        offered: Offered,
        *,
        weight_version: str | None = None,
        on_progress: OnProgress | None = None,
        **fields: Unpack[UpdateOptions],
    ) -> Receipt | StagedSoFar:
        """Call ``update`` with what another server of the same layout has ``offered``.

        Raises ``Conflict`` if that server's ranks are gone or silent, or their version moves on.
        """
        return await self.update(
            "peer",
            offer_id=offered.offer_id,
            token=offered.token,
            ranks=[rank.as_json() for rank in offered.ranks],
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
        partial: bool | None = None,
        lease_s: float = LEASE_S,
        on_progress: OnProgress | None = None,
        expected_digest: str | None = None,
        **fields: Unpack[BeginFields],
    ) -> AsyncIterator[Session]:
        """Open a session. Updates sent in the block go live together at its end.

        The yielded ``Session`` has a ``receipt`` after the block, and a ``session_id`` from the
        start. If the block raises, or this process dies, the session is dropped and nothing has
        changed. ``kv_cache`` or ``kv_max_age`` overrides the updates' policies. With
        ``expected_digest`` the session commits only tensors of this digest, all together (see
        ``digest_of_all``). ``fields`` are the fields of ``/begin_weight_update``. A client has one
        session at a time.
        """
        if expected_digest is not None:
            fields["received_digest"] = True
        async with self.opened(
            partial=partial, lease_s=lease_s, on_progress=on_progress, **fields
        ) as begun:
            session = Session(begun)
            yield session
            session.receipt = await self.end(
                weight_version=weight_version,
                kv_cache=kv_cache,
                kv_max_age=kv_max_age,
                expected_digest=expected_digest,
            )

    @asynccontextmanager
    async def opened(
        self,
        /,
        *,
        partial: bool | None = None,
        lease_s: float = LEASE_S,
        on_progress: OnProgress | None = None,
        **fields: Unpack[BeginFields],
    ) -> AsyncIterator[Begun]:
        """Open a session and renew its lease until the block ends. The block calls ``end``.

        The session is dropped if the block raises.
        """
        session_id = uuid.uuid4().hex
        given: Json = {**fields}
        # an earlier update may keep the call waiting
        turn_s = UPDATE_S if fields.get("on_busy", "wait") == "wait" else 0.0

        async def renew() -> None:
            await self._post(
                "begin_weight_update",
                attempts=ATTEMPTS,
                patience_s=lease_s / 2,
                session_id=session_id,
            )

        try:
            async with self._held("abort_weight_update", session_id=session_id):
                begun = await self._post(
                    "begin_weight_update",
                    attempts=ATTEMPTS,
                    patience_s=self.timeout_s + turn_s,
                    non_blocking=True,
                    new_id=session_id,
                    lease_s=lease_s,
                    partial=partial,
                    **given,
                )
                self._session_id, self._is_sealed = session_id, False
                async with (
                    repeating(f"Renewing a session of {self.url}", renew, lease_s / 3),
                    self._reporting(on_progress),
                ):
                    yield self._read(Begun, begun)
        finally:
            self._session_id = None

    async def seal(self, *, expected_digest: str | None = None) -> StagedSoFar:
        """Check the open session's tensors on every rank, so that its commit cannot fail.

        With ``expected_digest`` it also checks that their digest is this one. The session must have
        been begun with ``received_digest``.
        """
        answer = await self._post(
            "seal_weight_update",
            attempts=ATTEMPTS,
            patience_s=self.timeout_s + UPDATE_S,
            session_id=self._session_id,
            expected_digest=expected_digest,
        )
        self._is_sealed = True
        return self._read(StagedSoFar, answer)

    async def end(
        self,
        *,
        weight_version: str | None = None,
        kv_cache: KVPolicy | None = None,
        kv_max_age: int | None = None,
        expected_digest: str | None = None,
    ) -> Receipt:
        """Commit the open session, and seal it first if necessary.

        ``expected_digest`` is as in ``seal``.
        """
        receipt = await self._post(
            "end_weight_update",
            patience_s=self.timeout_s + (0.0 if self._is_sealed else UPDATE_S),
            non_blocking=True,
            session_id=self._session_id,
            weight_version=weight_version,
            kv_cache=kv_cache,
            kv_max_age=kv_max_age,
            expected_digest=expected_digest,
        )
        return self._read(Receipt, receipt)

    async def join_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = DEFAULT_GROUP,
        backend: str = "nccl",
    ) -> None:
        """Let every rank join a trainer's process group. Prefer ``Sender``.

        The server answers when the group is formed.
        """
        await self._post(
            "init_weights_update_group",
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )

    async def leave_group(self, group_name: str) -> None:
        """Let every rank leave a trainer's process group."""
        await self._post("destroy_weights_update_group", group_name=group_name)

    async def roll_back(
        self, *, weight_version: str | None = None, expected_version: str | None = None
    ) -> Receipt:
        """Return to the version before the last commit.

        The server refuses unless it serves ``expected_version``, the version to undo. With
        ``expected_version`` a rollback can be safely retried.
        """
        receipt = await self._post(
            "rollback_weights",
            weight_version=weight_version,
            expected_version=expected_version,
        )
        return self._read(Receipt, receipt)

    async def save_served_weights(
        self, path: str, *, expected_version: str | None = None, timeout_s: float | None = None
    ) -> Saved:
        """Have the server write the weights that it serves into ``path``, a folder on the server.

        Requests run on, and no update waits. Another server of the same layout takes them by
        ``update_from_disk(path, load_format="served")``. Raises ``Conflict`` if the served version
        is not ``expected_version``, or changes meanwhile; then nothing is left in the folder.
        """
        saved = await self._post(
            "save_served_weights",
            patience_s=self.timeout_s + (timeout_s or UPDATE_S),
            path=path,
            expected_version=expected_version,
            timeout_s=timeout_s,
        )
        return self._read(Saved, saved)

    async def discard_saved_weights(self, path: str) -> None:
        """Have the server delete what it has saved in ``path``."""
        await self._post("discard_saved_weights", path=path)

    async def offer_served_weights(
        self,
        *,
        expected_version: str | None = None,
        timeout_s: float | None = None,
        host: str | None = None,
    ) -> Offered:
        """Have the server offer the weights that it serves to others, for ``timeout_s`` seconds.

        Requests run on, and no update waits. Another server of the same layout takes them by
        ``update_from_peer(offered)``, rank from rank over the network. Each rank listens at
        ``host``, by default its machine's own address. A server has one offer at a time, so the
        call waits for the end of the one before. Raises ``Conflict`` if the served version is
        not ``expected_version``.
        """
        offered = await self._post(
            "offer_served_weights",
            patience_s=self.timeout_s + (timeout_s or UPDATE_S),
            expected_version=expected_version,
            timeout_s=timeout_s,
            host=host,
        )
        return self._read(Offered, offered)

    async def withdraw_served_weights(self, offer_id: str) -> None:
        """Have the server end an offer. A transfer that goes on is given up."""
        await self._post("withdraw_served_weights", offer_id=offer_id)

    async def expect_version(
        self,
        weight_version: str | None = None,
        *,
        digest: str | None = None,
        epoch: int | None = None,
    ) -> Expected:
        """Tell the server which version its fleet serves; None ends the expectation.

        While the server serves another one, it is not ready and refuses new requests. ``digest``
        is the first rank's, as in the status. Raises ``Conflict`` if the server has committed since
        ``epoch``.
        """
        told = await self._post(
            "expect_version", weight_version=weight_version, digest=digest, epoch=epoch
        )
        return self._read(Expected, told)

    async def drain(
        self, deadline_s: float = 30.0, *, reason: str | None = None, cancel: bool = False
    ) -> Drained:
        """Have the server take no new requests, and end those that run after ``deadline_s``.

        Requests that end so have the tokens they have. ``cancel`` ends the drain.
        """
        fields = {"cancel": True} if cancel else {"deadline_s": deadline_s, "reason": reason}
        return self._read(Drained, await self._post("drain", **fields))

    async def why_not_ready(self) -> str | None:
        """Return why the server takes no new requests (``/ready``), or None if it takes them."""
        reply = await self._request("GET", "/ready", attempts=ATTEMPTS)
        return None if reply.response.is_success else say_why(reply)

    async def release_memory(
        self, *tags: str, keep_weights: KeepWeights | None = None
    ) -> MemoryMoved:
        """Release memory while requests wait. Pause with ``retract`` first.

        ``tags`` are ``kv_cache``, ``weights`` and ``cuda_graph``; without tags all are released.
        ``keep_weights="host"`` restores the weights on resume; after ``"discard"`` they must be
        sent again.
        """
        moved = await self._post(
            "release_memory_occupation",
            patience_s=self.timeout_s + UPDATE_S,
            tags=list(tags),
            keep_weights=keep_weights,
        )
        return self._read(MemoryMoved, moved)

    async def resume_memory(self, *tags: str) -> MemoryMoved:
        """Resume the memory of ``tags``, or all. Generation continues once all is resumed."""
        moved = await self._post(
            "resume_memory_occupation", patience_s=self.timeout_s + UPDATE_S, tags=list(tags)
        )
        return self._read(MemoryMoved, moved)

    # ---- how -------------------------------------------------------------------------

    def streamed(
        self, path: str, body: Json | None, *, method: str = "POST"
    ) -> AbstractAsyncContextManager[httpx.Response]:
        """Send a request for tokens. The block has the response, whose body comes meanwhile.

        Raises ``httpx.HTTPError`` for a broken connection. Nothing is sent twice.
        """
        return self._http.stream(method, path, json=body)

    def _reporting(self, on_progress: OnProgress | None) -> AbstractAsyncContextManager[None]:
        if on_progress is None:
            return nullcontext()

        async def look() -> None:
            on_progress(Progress.read(self.url, await self.status()))

        return repeating(f"Looking at the progress of {self.url}", look, PROGRESS_S)

    @asynccontextmanager
    async def _held(self, call: str, **names: Any) -> AsyncIterator[None]:
        """Make ``call`` with ``names`` if the block fails, even if nothing was taken yet.

        An error of this call is only logged: the block's own error tells more, and the lease
        releases everything anyway.
        """
        try:
            yield
        except BaseException:
            with anyio.move_on_after(CLEANUP_S, shield=True):
                try:
                    await self._post(call, **names)
                except (InflightError, httpx.HTTPError) as error:
                    logger.info("%s: %s: %r", self.url, call, error)
            raise

    def _read(self, shape: type[A], body: Json) -> A:
        return read_answer(self.url, body, shape)

    async def _post(
        self, call: str, *, attempts: int = 1, patience_s: float | None = None, **body: Any
    ) -> Json:
        """Make a call, by its name in ``vocabulary/calls.py``."""
        path = TABLE[call].path
        assert path is not None
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
        """Send a call and return the answer's body. Raises as ``_request`` does."""
        reply = await self._request(method, path, body, attempts=attempts, patience_s=patience_s)
        if path == _STATUS:
            self._require_active(reply)
        return read_json(reply)

    async def _request(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        attempts: int,
        patience_s: float | None = None,
    ) -> Reply:
        """Send a call and return the answer, whatever its status.

        Raises ``NoAnswer`` after ``patience_s`` seconds, over all ``attempts``.
        """
        patience_s = patience_s or self.timeout_s
        try:
            async with asyncio.timeout(patience_s):
                if method == "POST" and not self._runs_with_us:
                    await self._require_us()
                return await self._send(method, path, body, attempts)
        except TimeoutError as error:
            raise NoAnswer(f"{self.url}{path} did not answer within {patience_s:g} s") from error

    async def _require_us(self) -> None:
        """Raise ``NotOffered`` if the server runs without us.

        If the server does not answer, the call goes ahead and reports the error itself. The next
        call asks again.
        """
        try:
            async with asyncio.timeout(ASK_S):
                reply = await self._send("GET", _STATUS, None, 1)
        except (TimeoutError, httpx.HTTPError) as error:
            logger.info("%s%s: %r", self.url, _STATUS, error)
            return
        self._require_active(reply)

    def _require_active(self, status: Reply) -> None:
        if (why := says_inactive(status) or says_other_version(status)) is not None:
            raise NotOffered(why)
        self._runs_with_us = self._runs_with_us or status.response.is_success

    async def _send(self, method: str, path: str, body: Json | None, attempts: int) -> Reply:
        for _ in range(attempts - 1):
            try:
                return await self._send_once(method, path, body)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                # the transport has retried already
                raise
            except httpx.TransportError as error:
                logger.info("%s%s, trying again: %r", self.url, path, error)
                await asyncio.sleep(0.1)
        return await self._send_once(method, path, body)

    async def _send_once(self, method: str, path: str, body: Json | None) -> Reply:
        async with self._http.stream(method, path, json=body) as response:
            return await read_reply(response)
