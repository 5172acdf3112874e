"""A client's connections to servers that die."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest
import uvloop

from sglang_inflight.client.connections import GIVE_UP_MS, Transport

RETRIES = 2


async def _turns() -> None:
    """Let the loop close what is to be closed."""
    for _ in range(10):
        await asyncio.sleep(0)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwhole")
    await writer.drain()
    writer.close()


def _ask(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> int:
    """Return the time, in ms, after which the connection to a server that answered is given up."""

    async def ask() -> int:
        server = await asyncio.start_server(_answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        async with (
            server,
            httpx.AsyncClient(transport=Transport(retries=RETRIES)) as client,
            client.stream("GET", url) as response,
        ):
            made = response.extensions["network_stream"].get_extra_info("socket")
            give_up = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert await response.aread() == b"whole"
            return int(give_up)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(ask())


@pytest.fixture
def ends_at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let so many of the next connections end before their maker has the connection."""
    connect = anyio.connect_tcp

    def set_count(count: int) -> None:
        left = [None] * count

        async def connect_and_lose(*args: Any, **kwargs: Any) -> Any:
            stream: Any = await connect(*args, **kwargs)
            with contextlib.suppress(IndexError):
                left.pop()
                stream._transport.abort()
                await _turns()
            return stream

        monkeypatch.setattr(anyio, "connect_tcp", connect_and_lose)

    return set_count


def test_connection_that_ends_at_once_is_made_again(
    ends_at_once: Callable[[int], None],
) -> None:
    ends_at_once(RETRIES)
    assert _ask(uvloop.new_event_loop) == GIVE_UP_MS


def test_connections_that_end_at_once_are_not_made(ends_at_once: Callable[[int], None]) -> None:
    ends_at_once(RETRIES + 1)
    with pytest.raises(httpx.ConnectError, match="closed the connection at once"):
        _ask(uvloop.new_event_loop)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_connection_to_a_dead_machine_is_given_up(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    assert _ask(make_loop) == GIVE_UP_MS
