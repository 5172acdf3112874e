"""A worker's calls to the owner, and the owner's answers.

Calls by HTTP are forwarded as they come. Two calls have no caller outside:

**Reload an evicted adapter** for a request. With one worker SGLang reloads the adapter itself.

**Abort a request by name** when any of several tokenizer workers may have it. SGLang's worker
forwards an unknown name to the schedulers. The schedulers end the request of that name at the
message's arrival, perhaps a later one than meant. The schedulers cannot end the requests of a
group, because they do not know a group's name. Here a request's own worker ends the request
(``StateBroadcast.abort``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, LoRAUpdateOutput
from sglang.srt.utils.auth import AuthLevel, auth_level
from starlette._utils import get_route_path
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from sglang_inflight.extensions.aborts.aborts import Aborts
from sglang_inflight.frontend.as_sglang import decode
from sglang_inflight.frontend.http.endpoints import refusal
from sglang_inflight.vocabulary.bodies import Body
from sglang_inflight.vocabulary.errors import Exhausted, Gone, InflightError, OutcomeUnknown

if TYPE_CHECKING:
    from sglang_inflight.extensions.workers.state_broadcast import StateBroadcast
    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager
    from sglang_inflight.sglang_types import LoadAdapterRequest

logger = logging.getLogger(__name__)

# SGLang's route, replaced in the owner's app
FLUSH = ("/flush_cache", ["GET", "POST"])
# answered by the worker itself: generation, its own requests, ranks, and SGLang's app, complete
# only in a worker
HERE = frozenset(
    (
        "/generate",
        "/inference/v1/generate",
        "/skyrl/v1/generate",
        "/inflight/wait",
        "/inflight/worker",
        "/ready",
        "/detokenize",
        "/abort_requests",
        "/liveness",
        "/get_world_size",
        "/server_info",
    )
)
# headers of a single connection, or rewritten here
_NOT_HANDED_ON = frozenset(
    (
        b"connection",
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"keep-alive",
        b"expect",
        b"date",
        b"server",
    )
)
# only on the owner's socket
_RELOADS = "/inflight/reload_lora_adapter"
# SGLang's route, replaced in a worker's app
_ABORT_REQUEST = "/abort_request"
# only on the owner's socket
_ABORTS = "/inflight/abort_requests"


def owners_client(calls: Path) -> httpx.AsyncClient:
    """Return a client for one call to the owner's socket ``calls``."""
    transport = httpx.AsyncHTTPTransport(uds=str(calls), verify=False)
    # no proxy from the environment, and no time limit but the caller's
    return httpx.AsyncClient(transport=transport, trust_env=False, timeout=None)


class Forward:
    """An ASGI app that streams a call to the owner and returns the answer.

    Each call has its own connection to the owner. The connection ends with the caller's, even in
    the middle of a body, or with this worker. The owner then cancels the call, like a server whose
    caller disconnected. The worker buffers at most a chunk of the body.
    """

    def __init__(self, calls: Path) -> None:
        self._calls = calls
        self._open = 0
        self._answered = asyncio.Event()
        self._answered.set()
        # SGLang's API-key middleware reads this attribute of an endpoint
        auth_level(AuthLevel.ADMIN_OPTIONAL)(self)

    def mount(self, app: FastAPI, ours: Sequence[BaseRoute]) -> None:
        """Put forwarding routes before ``ours``, and keep ``ours`` for the OpenAPI schema."""
        routes = [
            (route.path, sorted(route.methods or ()))
            for route in ours
            if isinstance(route, APIRoute) and route.path not in HERE
        ]
        app.router.routes[:0] = [
            Route(path, self, methods=methods, include_in_schema=False)
            for path, methods in (*routes, FLUSH)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._open += 1
        self._answered.clear()
        try:
            await self._forward_call(scope, receive, send)
        finally:
            self._open -= 1
            if not self._open:
                self._answered.set()

    async def until_answered(self) -> None:
        """Wait until no call waits for the owner's answer."""
        await self._answered.wait()

    async def _forward_call(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(receive)
        asking = asyncio.ensure_future(self._ask(scope, body))
        leaving = asyncio.ensure_future(body.until_gone())
        try:
            await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return
            answer = asking.result()
        except httpx.ConnectError as error:
            # read the whole body: a caller that is still sending does not read the answer
            with suppress(httpx.WriteError):
                async for _ in body.chunks():
                    pass
            await refusal(_owner_unreachable(error))(scope, receive, send)
            return
        except httpx.TransportError as error:
            if not body.is_cut_off:
                logger.error("%s: the owner of the server's state: %r", scope["path"], error)
                lost = OutcomeUnknown(f"the process that owns the server's state: {error!r}")
                await refusal(lost)(scope, receive, send)
            return
        finally:
            for task in (asking, leaving):
                task.cancel()
            await asyncio.wait({asking, leaving})
        headers = [
            (name, value) for name, value in answer.headers.raw if name not in _NOT_HANDED_ON
        ]
        headers.append((b"content-length", b"%d" % len(answer.content)))
        start = {
            "type": "http.response.start",
            "status": answer.status_code,
            "headers": headers,
        }
        await send(start)
        await send({"type": "http.response.body", "body": answer.content})

    async def _ask(self, scope: Scope, body: _Body) -> httpx.Response:
        async with owners_client(self._calls) as client:
            return await client.request(
                scope["method"],
                httpx.URL(
                    scheme="http",
                    host="owner",
                    path=get_route_path(scope),
                    query=scope["query_string"],
                ),
                headers=[
                    (name, value) for name, value in scope["headers"] if name not in _NOT_HANDED_ON
                ],
                content=body.chunks(),
            )


def _owner_unreachable(error: httpx.ConnectError) -> InflightError:
    kind = Exhausted if Exhausted.is_cause_of(error) else Gone
    return kind(f"this tokenizer worker cannot ask the owner of the server's state: {error}")


class _Body:
    """A caller's body, and the end of its connection."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_whole = asyncio.Event()
        self.is_cut_off = False

    async def chunks(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_cut_off = True
                raise httpx.WriteError("the caller disconnected in the middle of the body")
            more = message.get("more_body", False)
            yield message.get("body", b"")
        self._is_whole.set()

    async def until_gone(self) -> None:
        await self._is_whole.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_cut_off = True


class _Reload(msgspec.Struct):
    lora_name: str
    lora_path: str
    pinned: bool | None


class _Reloaded(msgspec.Struct):
    success: bool
    error_message: str


async def reload(calls: Path, request: LoadAdapterRequest) -> LoRAUpdateOutput:
    """Ask the owner, from a worker, to reload an adapter. The worker has it after the return."""
    asked: Any = msgspec.convert(request, _Reload, from_attributes=True)
    async with owners_client(calls) as client:
        response = await client.post(f"http://owner{_RELOADS}", content=msgspec.json.encode(asked))
        response.raise_for_status()
    answer = msgspec.json.decode(response.content, type=_Reloaded)
    return LoRAUpdateOutput(success=answer.success, error_message=answer.error_message)


def mount_reloads(app: FastAPI, manager: PatchedTokenizerManager) -> None:
    """Mount the owner's route for workers' reloads."""

    async def load(request: Request) -> Response:
        asked = msgspec.json.decode(await request.body(), type=_Reload)
        result: LoRAUpdateOutput = await manager.load_lora_adapter(
            LoadLoRAAdapterReqInput(**msgspec.structs.asdict(asked))
        )
        answer = _Reloaded(success=result.success, error_message=result.error_message or "")
        return Response(msgspec.json.encode(answer), media_type="application/json")

    app.router.add_api_route(_RELOADS, load, methods=["POST"])


class AbortBody(Body, kw_only=True):
    sglang = "AbortReq"

    rid: str | None = None
    abort_all: bool = False


async def abort(calls: Path, names: list[str]) -> int:
    """Ask the owner, from a worker, to abort ``names``. Return the number of aborted requests.

    The schedulers have the aborts by the time of the return.
    """
    try:
        async with owners_client(calls) as client:
            response = await client.post(
                f"http://owner{_ABORTS}", content=msgspec.json.encode(names)
            )
            response.raise_for_status()
    except httpx.HTTPError as error:
        raise OutcomeUnknown(f"the process that owns the server's state: {error!r}") from error
    return msgspec.json.decode(response.content, type=int)


def mount_abort_request(app: FastAPI, tokenizer_manager: PatchedTokenizerManager) -> None:
    """Put our route before SGLang's. Both always answer 200 without content."""

    async def abort_request(request: Request) -> Response:
        try:
            body = decode(await request.body(), AbortBody)
            if body.abort_all:
                tokenizer_manager.abort_request(abort_all=True)
            elif body.rid:
                await tokenizer_manager.inflight.part(Aborts).everywhere([body.rid])
        except InflightError as error:
            return refusal(error)
        return Response()

    endpoint = auth_level(AuthLevel.ADMIN_OPTIONAL)(abort_request)
    app.router.routes.insert(
        0, Route(_ABORT_REQUEST, endpoint, methods=["POST"], include_in_schema=False)
    )


def mount_aborts(app: FastAPI, broadcast: StateBroadcast) -> None:
    """Mount the owner's route for workers' aborts."""

    async def end(request: Request) -> Response:
        names = msgspec.json.decode(await request.body(), type=list[str])
        content = msgspec.json.encode(await broadcast.abort(names))
        return Response(content, media_type="application/json")

    app.router.add_api_route(_ABORTS, end, methods=["POST"])
