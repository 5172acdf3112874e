"""What workers are told, and who is waited for, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_inflight.frontend.workers import state_broadcast
from sglang_inflight.frontend.workers.protocol import (
    Ack,
    Adapter,
    AdapterRefs,
    Idle,
    Moved,
    ServerState,
    Uses,
    line,
    read_told,
)
from sglang_inflight.frontend.workers.state_broadcast import StateBroadcast

FIRST = ServerState(
    weight_version="v0",
    model_path="m",
    load_format="auto",
    initial_weights_loaded=True,
    paused=False,
    hollow=False,
    forgotten=0,
    adapters=(),
    reloadable=(),
)


class Server:
    """A broadcast on a socket, and what it finds when it looks."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state"
        self.now = FIRST
        self.to_end = asyncio.Event()
        self.counted: asyncio.Queue[tuple[Uses, Uses]] = asyncio.Queue()
        self.broadcast = StateBroadcast(lambda: self.now, self._count, self.to_end.set)

    async def _count(self, before: Uses, now: Uses) -> None:
        self.counted.put_nowait((before, now))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.path)


def on_a_board(tmp_path: Path, doing: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        server = Server(tmp_path)
        async with await asyncio.start_unix_server(server.broadcast.attend, server.path):
            async with asyncio.timeout(60):
                await doing(server)

    asyncio.run(run())


async def told(reader: asyncio.StreamReader) -> ServerState:
    state = read_told(await reader.readline())
    assert isinstance(state, ServerState)
    return state


def test_an_answer_waits_for_every_worker(tmp_path: Path) -> None:
    async def do(server: Server) -> None:
        workers = [await server.connect() for _ in range(2)]
        numbers = [(await told(reader)).number for reader, _ in workers]
        assert numbers == [1, 1]
        server.now = msgspec.structs.replace(FIRST, weight_version="v1")
        answer = asyncio.ensure_future(server.broadcast.wait_acked())
        for reader, writer in workers:
            state = await told(reader)
            assert (state.number, state.weight_version) == (2, "v1")
            assert not answer.done()
            writer.write(line(Ack(state.number)))
        await answer
        # what has not changed is not told again, and not waited for
        server.broadcast.post()
        await server.broadcast.wait_acked()
        for _, writer in workers:
            writer.close()

    on_a_board(tmp_path, do)


def test_nobody_waits_for_a_worker_that_died(tmp_path: Path) -> None:
    async def do(server: Server) -> None:
        reader, writer = await server.connect()
        await told(reader)
        server.now = msgspec.structs.replace(FIRST, paused=True)
        answer: asyncio.Future[Any] = asyncio.ensure_future(server.broadcast.wait_acked())
        await told(reader)
        assert not answer.done()
        writer.close()
        await answer
        # the one that takes its place hears what there is to know at once
        reader, writer = await server.connect()
        assert (await told(reader)).paused
        writer.close()

    on_a_board(tmp_path, do)


def test_a_worker_that_is_silent_keeps_one_answer_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_broadcast, "HEARING_TIMEOUT_S", 0.05)

    async def do(server: Server) -> None:
        reader, writer = await server.connect()
        await told(reader)
        await server.broadcast.wait_acked()
        assert caplog.text.count("have not heard") == 1
        await server.broadcast.wait_acked()
        assert caplog.text.count("have not heard") == 1
        writer.close()

    on_a_board(tmp_path, do)


def test_what_a_worker_uses_ends_with_it(tmp_path: Path) -> None:
    async def do(server: Server) -> None:
        _, writer = await server.connect()
        writer.write(line(AdapterRefs({"a": 1})))
        writer.write(line(AdapterRefs({"a": 2, "b": 1})))
        assert await server.counted.get() == ({}, {"a": 1})
        assert await server.counted.get() == ({"a": 1}, {"a": 2, "b": 1})
        writer.close()
        assert await server.counted.get() == ({"a": 2, "b": 1}, {})

    on_a_board(tmp_path, do)


def test_a_move_is_waited_for(tmp_path: Path) -> None:
    """It comes after the state of the adapter, and what says that it was heard comes after it."""
    new = Adapter(lora_id="b", lora_name="policy", lora_path="p", pinned=False)

    async def do(server: Server) -> None:
        reader, writer = await server.connect()
        await told(reader)
        server.now = msgspec.structs.replace(FIRST, adapters=(new,))
        server.broadcast.tell_of_move(["r"], "a", "b")
        heard: asyncio.Future[Any] = asyncio.ensure_future(server.broadcast.wait_acked())
        assert (await told(reader)).adapters == (new,)
        assert read_told(await reader.readline()) == Moved(["r"], "a", "b")
        writer.write(line(Ack(2)))
        writer.write(line(AdapterRefs({"b": 1})))
        await server.counted.get()
        assert not heard.done()
        writer.write(line(Ack((await told(reader)).number)))
        await heard
        writer.close()

    on_a_board(tmp_path, do)


def test_the_last_worker_with_requests_ends_the_server(tmp_path: Path) -> None:
    async def do(server: Server) -> None:
        (first, first_says), (second, second_says), (_, third_says) = [
            await server.connect() for _ in range(3)
        ]
        server.broadcast.end_when_drained()
        first_says.write(line(Idle()))
        # it has died, with its requests
        second_says.close()
        first_says.close()
        for reader in (first, second):
            await reader.read()
        assert not server.to_end.is_set()
        third_says.write(line(Idle()))
        await server.to_end.wait()

    on_a_board(tmp_path, do)


def test_workers_that_go_alone_end_no_server(tmp_path: Path) -> None:
    async def do(server: Server) -> None:
        for _ in range(2):
            reader, writer = await server.connect()
            await told(reader)
            writer.write(line(Idle()))
            writer.write_eof()
            await reader.read()
        assert not server.to_end.is_set()
        # now none is left to wait for
        server.broadcast.end_when_drained()
        assert server.to_end.is_set()

    on_a_board(tmp_path, do)
