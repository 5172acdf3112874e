"""Run updates one after the other while streams run, and record each outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from examples.stories.streams import Streams
from examples.stories.styles import Style
from examples.stories.updates import Receipt
from sglang_inflight.client import AsyncClient
from sglang_inflight.vocabulary.errors import InflightError

STATUS_EVERY_S = 0.5
# tokens after which every story is certain to go on
GOING = 3

Pause = Callable[[], AbstractAsyncContextManager[Any]]


@dataclass(frozen=True)
class Update:
    """An update to ``version``, which writes in ``style``. ``name`` is the update's source.

    The update can begin when ``ready`` is done. ``send`` performs it. ``patches`` is the checkpoint
    to which the update is a patch; None if the update brings whole weights.
    """

    name: str
    version: str
    checkpoint: Path
    style: Style
    ready: asyncio.Future[None]
    send: Callable[[], Awaitable[Receipt]]
    patches: Path | None = None


@dataclass(frozen=True)
class UpdateResult:
    update: Update
    receipt: Receipt
    started: float
    ended: float


class Screen(Protocol):
    def show_stories(self, streams: Streams) -> None: ...

    def wait_for(self, update: Update) -> None: ...

    def begin(self, update: Update) -> None: ...

    def show_staged(self, update: Update, nbytes: int) -> None: ...

    def end(self, result: UpdateResult) -> None: ...


def sampling(tokens: int, special_ids: Sequence[int]) -> dict[str, Any]:
    """Ban the tokens that end a turn, because a story must not stop by itself."""
    return {
        "max_new_tokens": tokens,
        "ignore_eos": True,
        "logit_bias": {str(token): -100.0 for token in special_ids},
        "temperature": 0.8,
        "top_p": 0.95,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.1,
    }


async def update_while_streaming(
    http: httpx.AsyncClient,
    client: AsyncClient,
    streams: Streams,
    updates: Sequence[Update],
    *,
    reading: int,
    sampling: dict[str, Any],
    screen: Screen,
) -> list[UpdateResult]:
    """Update while streams run, after ``reading`` tokens of each version.

    ``http`` requests the streams; ``client`` is the trainer's side of the same server.
    """
    async with asyncio.TaskGroup() as tasks:
        streaming = tasks.create_task(streams.run(http, sampling))
        tasks.create_task(_show(streams, screen, streaming))
        results = []
        for update in updates:
            await streams.reach(streams.slowest + reading)
            if await _until_ready(update, client.paused, screen):
                # the pause is not to count as a gap of the update
                await streams.reach(streams.slowest + GOING)
            results.append(await _send(update, client, screen))
    return results


async def _until_ready(update: Update, pause: Pause, screen: Screen) -> bool:
    """Pause the stories until the update is ready, because they must not end before it.

    Return whether they had to pause.
    """
    must_wait = not update.ready.done()
    if must_wait:
        screen.wait_for(update)
        async with pause():
            await asyncio.wait([update.ready])
    await update.ready
    return must_wait


async def _send(update: Update, client: AsyncClient, screen: Screen) -> UpdateResult:
    """Send the update. A failure is a result, too."""
    screen.begin(update)
    watching = asyncio.create_task(_watch_staging(update, client, screen))
    started = time.monotonic()
    try:
        receipt = await update.send()
    except (InflightError, httpx.HTTPError) as error:
        receipt = {"success": False, "message": str(error) or type(error).__name__}
    finally:
        watching.cancel()
    result = UpdateResult(update, receipt, started, time.monotonic())
    screen.end(result)
    return result


async def _show(streams: Streams, screen: Screen, streaming: asyncio.Task[None]) -> None:
    while not streaming.done():
        screen.show_stories(streams)
        await asyncio.wait([streaming], timeout=0.25)
    screen.show_stories(streams)


async def _watch_staging(update: Update, client: AsyncClient, screen: Screen) -> None:
    """Show progress. A missing status is left out: progress is only for display."""
    while True:
        await asyncio.sleep(STATUS_EVERY_S)
        try:
            staging = (await client.status()).get("staging")
        except (InflightError, httpx.HTTPError):
            continue
        if staging:
            screen.show_staged(update, staging["bytes"])
