"""Send empty lines in event streams during a pause, so that proxies keep the connections.

Every reader ignores an empty line, because an empty line ends each event. A comment would give
the reason, and readers of event streams ignore comments too. But SGLang's own benchmark, for
one, reads each non-empty line as JSON. So comments are sent only with ``sse_comment``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette._utils import get_route_path
from starlette.middleware import Middleware
from starlette.types import Message, Receive, Scope, Send

from sglang_inflight.extensions.comments import CommentsSettings
from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.tokenizer_hooks import ROUTES
from sglang_inflight.settings import read

if TYPE_CHECKING:
    from fastapi import FastAPI

    from sglang_inflight.sglang_types import TokenizerManager

Mode = Callable[[], Awaitable[str | None]]

_EVENT_STREAM = b"text/event-stream"
# Routes known to answer a request with "stream" by an event stream.
_STREAMS = frozenset(
    ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
)


@ROUTES.join()
def add_comments(app: FastAPI, frontend: Frontend, _: TokenizerManager) -> None:
    settings = read(CommentsSettings)
    app.user_middleware.append(
        Middleware(
            PauseComments,
            mode=frontend.pauses.mode,
            every_s=settings.sse_comment_s,
            says_why=settings.sse_comment,
        )
    )


class PauseComments:
    """ASGI middleware, the innermost: messages arrive here as the routes wrote them."""

    def __init__(self, app: Any, *, mode: Mode, every_s: float, says_why: bool) -> None:
        self._app = app
        self._mode = mode
        self._every_s = every_s
        self._says_why = says_why

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or get_route_path(scope) not in _STREAMS:
            await self._app(scope, receive, send)
            return
        stream = _Stream(receive, send, self._mode, self._every_s, says_why=self._says_why)
        commenting = asyncio.ensure_future(stream.comment())
        try:
            await self._app(scope, stream.receive, stream.send)
        finally:
            commenting.cancel()
            # the client may have left
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await commenting


class _Stream:
    """One request and its answer.

    OpenAI's routes begin an answer at the first token. If a pause delays the first token, the
    answer begins early with a 200: the request was checked before it was queued. A later error
    becomes an event, like errors in the middle of a stream.
    """

    def __init__(
        self, receive: Receive, send: Send, mode: Mode, every_s: float, *, says_why: bool
    ) -> None:
        self._receive = receive
        self._send = send
        self._mode = mode
        self._every_s = every_s
        self._says_why = says_why
        self._due = time.monotonic() + every_s
        # keeps comments and events apart
        self._sending = asyncio.Lock()
        self._body: list[bytes] = []
        self._is_events = False
        self._began_early = False
        # body so far of a route's answer that is no event stream, after an early 200
        self._error: list[bytes] | None = None
        self._between_events = True
        self._ended = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not self._is_events:
            self._body.append(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        async with self._sending:
            if message["type"] == "http.response.start":
                await self._begin(message)
            elif message["type"] == "http.response.body":
                await self._go_on(message)
            else:
                await self._send(message)

    async def comment(self) -> None:
        while not self._ended:
            await asyncio.sleep(max(0.0, self._due - time.monotonic()))
            if time.monotonic() < self._due:
                continue
            mode = await self._mode()
            async with self._sending:
                # an event may have been sent while the ranks were asked for the mode
                if time.monotonic() >= self._due:
                    self._due = time.monotonic() + self._every_s
                    if mode is not None and await self._may_comment():
                        line = f": paused mode={mode}\n\n" if self._says_why else "\n"
                        await self._send(_body(line.encode(), more=True))

    async def _begin(self, message: Message) -> None:
        self._body.clear()
        types = [value for name, value in message["headers"] if name.lower() == b"content-type"]
        is_events = any(value.startswith(_EVENT_STREAM) for value in types)
        if not self._began_early:
            self._is_events = is_events
            await self._send(message)
        elif not is_events:
            self._error = []

    async def _go_on(self, message: Message) -> None:
        content, more = message.get("body", b""), message.get("more_body", False)
        if self._error is not None:
            self._error.append(content)
            if more:
                return
            content = _as_events(b"".join(self._error))
        if content:
            self._between_events = content.endswith((b"\n\n", b"\r\n\r\n"))
        self._due = time.monotonic() + self._every_s
        self._ended = not more
        await self._send(_body(content, more=more))

    async def _may_comment(self) -> bool:
        if self._ended or not self._between_events or self._error is not None:
            return False
        if not self._is_events and self._asks_for_a_stream():
            await self._begin_early()
        return self._is_events

    async def _begin_early(self) -> None:
        self._body.clear()
        self._is_events = self._began_early = True
        headers = [(b"content-type", _EVENT_STREAM + b"; charset=utf-8")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def _asks_for_a_stream(self) -> bool:
        try:
            return msgspec.json.decode(b"".join(self._body), type=_Asks).stream
        except (msgspec.DecodeError, RecursionError):
            return False


def _as_events(error: bytes) -> bytes:
    """Return an error event in the form of SGLang's streams, and the end of the stream."""
    try:
        said = msgspec.json.decode(error)
    except msgspec.DecodeError:
        said = {"message": error.decode(errors="replace")}
    event = said if isinstance(said, dict) and "error" in said else {"error": said}
    return b"data: " + msgspec.json.encode(event) + b"\n\ndata: [DONE]\n\n"


class _Asks(msgspec.Struct):
    stream: bool = False


def _body(content: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}
