"""A forwarded call, and the end of either side."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from sglang_inflight.extensions.workers.forward import Forward


class Owner:
    """An app that echoes its request, or waits until its caller has left."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.asked = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.set()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            self.chunks.append(message["body"])
            more = message["more_body"]
        if scope["path"] == "/wait":
            await receive()
            self.left.set()
            return
        said = b"%s %s?%s" % (scope["method"].encode(), scope["raw_path"], scope["query_string"])
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 409, "headers": headers})
        await send({"type": "http.response.body", "body": said})


class Caller:
    """An HTTP connection, from the server to an app."""

    def __init__(self, forward: Forward, path: str, root_path: str = "") -> None:
        self.sent: list[Message] = []
        self.says: asyncio.Queue[Message] = asyncio.Queue()
        scope = {
            "type": "http",
            "method": "POST",
            "path": root_path + path,
            "root_path": root_path,
            "query_string": b"a=1&b=2",
            "headers": [(b"content-length", b"6"), (b"x-key", b"secret")],
        }
        self.call = asyncio.ensure_future(forward(scope, self.says.get, self._record))

    async def _record(self, message: Message) -> None:
        self.sent.append(message)

    def send(self, body: bytes, *, more: bool) -> None:
        self.says.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self.says.put_nowait({"type": "http.disconnect"})


def with_owner(tmp_path: Path, doing: Callable[[Owner, Forward], Awaitable[None]]) -> None:
    async def run() -> None:
        owner, path = Owner(), tmp_path / "calls"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()
            config = uvicorn.Config(owner, lifespan="off", log_config=None)
            server = uvicorn.Server(config)
            async with serving(server, listening), asyncio.timeout(60):
                await doing(owner, Forward(path))

    asyncio.run(run())


@asynccontextmanager
async def serving(server: uvicorn.Server, listening: socket.socket) -> AsyncIterator[None]:
    task = asyncio.ensure_future(server.serve(sockets=[listening]))
    yield
    server.should_exit = True
    await task


@pytest.mark.parametrize("root_path", ["", "/api"])
def test_forwarded_call_keeps_body_and_answer(tmp_path: Path, root_path: str) -> None:
    async def do(owner: Owner, forward: Forward) -> None:
        caller = Caller(forward, "/echo", root_path)
        caller.send(b"one", more=True)
        # the first part is sent before the second exists
        while not owner.chunks:
            await asyncio.sleep(0)
        caller.send(b"two", more=False)
        await caller.call
        start, body = caller.sent
        assert start["status"] == 409
        assert (b"content-type", b"text/plain") in start["headers"]
        assert body["body"] == b"POST /echo?a=1&b=2"
        assert b"".join(owner.chunks) == b"onetwo"

    with_owner(tmp_path, do)


@pytest.mark.parametrize("whole", [True, False])
def test_owner_sees_disconnect_of_forwarded_call(tmp_path: Path, whole: bool) -> None:
    async def do(owner: Owner, forward: Forward) -> None:
        caller = Caller(forward, "/wait")
        caller.send(b"one", more=not whole)
        await owner.asked.wait()
        caller.leave()
        await caller.call
        await owner.left.wait()
        assert caller.sent == []

    with_owner(tmp_path, do)


def test_forward_to_a_dead_owner_answers_503(tmp_path: Path) -> None:
    """The owner was not asked, so nothing has changed."""

    async def do() -> list[Message]:
        caller = Caller(Forward(tmp_path / "nowhere"), "/echo")
        caller.send(b"", more=False)
        await caller.call
        return caller.sent

    sent: list[Any] = asyncio.run(do())
    assert sent[0]["status"] == 503
    assert b"Gone" in sent[1]["body"]
