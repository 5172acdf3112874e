"""State broadcast to workers and waits for their acks, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_inflight.extensions.workers import state_broadcast
from sglang_inflight.extensions.workers.protocol import (
    Ack,
    Adapter,
    AdapterRefs,
    Idle,
    Moved,
    ServerState,
    Uses,
    line,
    read_owner_message,
)
from sglang_inflight.extensions.workers.state_broadcast import StateBroadcast
from sglang_inflight.vocabulary.labels import VersionLabel

FIRST = ServerState(
    weight_version="v0",
    model_path="m",
    load_format="auto",
    initial_weights_loaded=True,
    paused=False,
    labels=(VersionLabel(0, "v0"),),
    adapter_versions=(),
    rejects=False,
    hollow=False,
    behind=None,
    forgotten=0,
    adapters=(),
    reloadable=(),
)


class Server:
    """A broadcast on a socket, and the state it reads."""

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


def with_a_server(tmp_path: Path, doing: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        server = Server(tmp_path)
        async with await asyncio.start_unix_server(server.broadcast.serve_worker, server.path):
            async with asyncio.timeout(60):
                await doing(server)

    asyncio.run(run())


async def told(reader: asyncio.StreamReader) -> ServerState:
    state = read_owner_message(await reader.readline())
    assert isinstance(state, ServerState)
    return state


def test_wait_acked_waits_for_every_worker(tmp_path: Path) -> None:
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
        # unchanged state is neither sent nor waited for
        server.broadcast.post()
        await server.broadcast.wait_acked()
        for _, writer in workers:
            writer.close()

    with_a_server(tmp_path, do)


def test_wait_acked_skips_dead_workers(tmp_path: Path) -> None:
    async def do(server: Server) -> None:
        reader, writer = await server.connect()
        await told(reader)
        server.now = msgspec.structs.replace(FIRST, paused=True)
        answer: asyncio.Future[Any] = asyncio.ensure_future(server.broadcast.wait_acked())
        await told(reader)
        assert not answer.done()
        writer.close()
        await answer
        # the replacement worker gets the whole state at once
        reader, writer = await server.connect()
        assert (await told(reader)).paused
        writer.close()

    with_a_server(tmp_path, do)


def test_silent_worker_delays_only_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_broadcast, "ACK_TIMEOUT_S", 0.05)

    async def do(server: Server) -> None:
        reader, writer = await server.connect()
        await told(reader)
        await server.broadcast.wait_acked()
        assert caplog.text.count("have not acked") == 1
        await server.broadcast.wait_acked()
        assert caplog.text.count("have not acked") == 1
        writer.close()

    with_a_server(tmp_path, do)


def test_adapter_counts_end_with_their_worker(tmp_path: Path) -> None:
    async def do(server: Server) -> None:
        _, writer = await server.connect()
        writer.write(line(AdapterRefs({"a": 1})))
        writer.write(line(AdapterRefs({"a": 2, "b": 1})))
        assert await server.counted.get() == ({}, {"a": 1})
        assert await server.counted.get() == ({"a": 1}, {"a": 2, "b": 1})
        writer.close()
        assert await server.counted.get() == ({"a": 2, "b": 1}, {})

    with_a_server(tmp_path, do)


def test_wait_acked_waits_for_moves(tmp_path: Path) -> None:
    """The move follows the adapter's state, and its ack follows the move."""
    new = Adapter(lora_id="b", lora_name="policy", lora_path="p", pinned=False)

    async def do(server: Server) -> None:
        reader, writer = await server.connect()
        await told(reader)
        server.now = msgspec.structs.replace(FIRST, adapters=(new,))
        server.broadcast.post_move(["r"], "a", "b")
        heard: asyncio.Future[Any] = asyncio.ensure_future(server.broadcast.wait_acked())
        assert (await told(reader)).adapters == (new,)
        assert read_owner_message(await reader.readline()) == Moved(["r"], "a", "b")
        writer.write(line(Ack(2)))
        writer.write(line(AdapterRefs({"b": 1})))
        await server.counted.get()
        assert not heard.done()
        writer.write(line(Ack((await told(reader)).number)))
        await heard
        writer.close()

    with_a_server(tmp_path, do)


def test_last_busy_worker_ends_server(tmp_path: Path) -> None:
    async def do(server: Server) -> None:
        (first, first_says), (second, second_says), (_, third_says) = [
            await server.connect() for _ in range(3)
        ]
        server.broadcast.end_when_drained()
        first_says.write(line(Idle()))
        # the second worker died, with its requests
        second_says.close()
        first_says.close()
        for reader in (first, second):
            await reader.read()
        assert not server.to_end.is_set()
        third_says.write(line(Idle()))
        await server.to_end.wait()

    with_a_server(tmp_path, do)


def test_single_worker_exit_does_not_end_server(tmp_path: Path) -> None:
    async def do(server: Server) -> None:
        for _ in range(2):
            reader, writer = await server.connect()
            await told(reader)
            writer.write(line(Idle()))
            writer.write_eof()
            await reader.read()
        assert not server.to_end.is_set()
        # no worker is left to wait for
        server.broadcast.end_when_drained()
        assert server.to_end.is_set()

    with_a_server(tmp_path, do)
