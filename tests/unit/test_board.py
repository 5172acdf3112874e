"""What workers are told, and who is waited for, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_inflight.frontend.workers import board
from sglang_inflight.frontend.workers.board import Board
from sglang_inflight.frontend.workers.news import Heard, Leaving, News, line, read_news

FIRST = News(
    weight_version="v0",
    model_path="m",
    load_format="auto",
    paused=False,
    hollow=False,
    forgotten=0,
)


class Server:
    """A board on a socket, and what it finds when it looks."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "news"
        self.now = FIRST
        self.told_to_go = asyncio.Event()
        self.board = Board(lambda: self.now, self.told_to_go.set)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.path)


def on_a_board(tmp_path: Path, doing: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        server = Server(tmp_path)
        async with await asyncio.start_unix_server(server.board.attend, server.path):
            async with asyncio.timeout(60):
                await doing(server)

    asyncio.run(run())


async def told(reader: asyncio.StreamReader) -> News:
    return read_news(await reader.readline())


def test_an_answer_waits_for_every_worker(tmp_path: Path) -> None:
    async def do(server: Server) -> None:
        workers = [await server.connect() for _ in range(2)]
        numbers = [(await told(reader)).number for reader, _ in workers]
        assert numbers == [1, 1]
        server.now = msgspec.structs.replace(FIRST, weight_version="v1")
        answer = asyncio.ensure_future(server.board.until_heard())
        for reader, writer in workers:
            news = await told(reader)
            assert (news.number, news.weight_version) == (2, "v1")
            assert not answer.done()
            writer.write(line(Heard(news.number)))
        await answer
        # what has not changed is not told again, and not waited for
        server.board.post()
        await server.board.until_heard()
        _, writer = workers[0]
        writer.write(line(Leaving()))
        await server.told_to_go.wait()
        for _, writer in workers:
            writer.close()

    on_a_board(tmp_path, do)


def test_nobody_waits_for_a_worker_that_died(tmp_path: Path) -> None:
    async def do(server: Server) -> None:
        reader, writer = await server.connect()
        await told(reader)
        server.now = msgspec.structs.replace(FIRST, paused=True)
        answer: asyncio.Future[Any] = asyncio.ensure_future(server.board.until_heard())
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
    monkeypatch.setattr(board, "HEARING_TIMEOUT_S", 0.05)

    async def do(server: Server) -> None:
        reader, writer = await server.connect()
        await told(reader)
        await server.board.until_heard()
        assert caplog.text.count("have not heard") == 1
        await server.board.until_heard()
        assert caplog.text.count("have not heard") == 1
        writer.close()

    on_a_board(tmp_path, do)
