"""The demo's order of events, and its receipts."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console

from examples.stories.pacing import READING, SHORTEST, UPDATE_S, UPDATES, Pacing
from examples.stories.report import colour_versions, show_receipts
from examples.stories.streams import Story
from examples.stories.styles import HEADLINE
from examples.stories.updates import Receipt
from examples.stories.updating import Update, UpdateResult, _until_ready

RECEIPT = {
    "success": True,
    "message": "",
    "base_version": "v3",
    "weight_version": "v4",
    "epoch": 3,
    "bytes": 269_030_016,
    "tensors": 272,
    "staged_s": 12.345,
    "stall_ms": 10.59,
    "ranks": [{"success": True, "digest": "0ce241a8deadbeef"}] * 2,
}


def _update(ready: asyncio.Future[None]) -> Update:
    async def update() -> Receipt:
        return RECEIPT

    return Update("from a trainer", "v4", Path("headline"), HEADLINE, ready, update)


def test_receipts_fit_80_columns() -> None:
    async def update() -> Update:
        return _update(asyncio.get_running_loop().create_future())

    result = UpdateResult(asyncio.run(update()), RECEIPT, started=0.0, ended=9.0)
    story = Story("a story", [1], arrivals=[0.0, 1.0, 13.840])
    paper = io.StringIO()
    console = Console(file=paper, width=80)
    show_receipts(console, [result], [story], colour_versions(["v3", "v4"]))
    lines = paper.getvalue().splitlines()
    assert max(len(line) for line in lines) <= 80
    (heads,) = [line for line in lines if "version" in line]
    for head in ("came", "digest", "MB", "staged s", "held ms", "gap ms"):
        assert f" {head} " in heads
    (row,) = [line for line in lines if "from a trainer" in line]
    for value in ("v3 → v4", "0ce241a8", "269", "12.35", "10.59", "12840"):
        assert f" {value} " in row


class _Notes:
    """A screen and a pause that record events in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def wait_for(self, update: Update) -> None:
        self.events.append("waits")

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        self.events.append("paused")
        yield
        self.events.append("resumed")


def test_stories_pause_until_version_is_ready() -> None:
    async def play() -> list[str]:
        notes = _Notes()
        ready = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(_until_ready(_update(ready), notes.pause, notes))  # type: ignore[arg-type]
        while "paused" not in notes.events:
            await asyncio.sleep(0)
        assert not waiting.done()
        notes.events.append("ready")
        ready.set_result(None)
        assert await waiting
        return notes.events

    assert asyncio.run(play()) == ["waits", "paused", "ready", "resumed"]


def test_ready_version_does_not_pause() -> None:
    async def play() -> list[str]:
        notes = _Notes()
        ready = asyncio.get_running_loop().create_future()
        ready.set_result(None)
        assert not await _until_ready(_update(ready), notes.pause, notes)  # type: ignore[arg-type]
        return notes.events

    assert asyncio.run(play()) == []


def test_failed_version_ends_pause_and_raises() -> None:
    async def play() -> list[str]:
        notes = _Notes()
        ready = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(_until_ready(_update(ready), notes.pause, notes))  # type: ignore[arg-type]
        while "paused" not in notes.events:
            await asyncio.sleep(0)
        ready.set_exception(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await waiting
        return notes.events

    assert asyncio.run(play()) == ["waits", "paused", "resumed"]


@pytest.mark.parametrize("step_s", [0.02, 0.05, 0.1, 0.4])
def test_stories_are_longer_than_updates(step_s: float) -> None:
    pacing = Pacing.at(step_s, longest=100_000)
    read = (UPDATES + 1) * pacing.reading
    assert (pacing.tokens - read) * step_s >= UPDATES * UPDATE_S
    assert pacing.tokens >= SHORTEST
    assert pacing.reading == READING


def test_story_length_is_limited_by_server() -> None:
    assert Pacing.at(1e-4, longest=3800).tokens == 3800
