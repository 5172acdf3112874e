"""Updates, one after the other, while streams run: when each begins, and what came of it."""

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
from sglang_inflight.errors import InflightError

STATUS_EVERY_S = 0.5
# tokens after which every story goes on for certain
GOING = 3

Pause = Callable[[], AbstractAsyncContextManager[Any]]


@dataclass(frozen=True)
class Update:
    """``name`` says by which way ``version`` comes, which writes in ``style``.

    It can begin when ``ready`` is done, and ``send`` does it.
    """

    name: str
    version: str
    checkpoint: Path
    style: Style
    ready: asyncio.Future[None]
    send: Callable[[], Awaitable[Receipt]]


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
    """A story must not stop by itself, so the tokens that end a turn are banned."""
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
    """Each version is read for ``reading`` tokens before the next update begins.

    ``http`` asks for the streams, ``client`` is the trainer's side of the same server.
    """
    async with asyncio.TaskGroup() as tasks:
        streaming = tasks.create_task(streams.run(http, sampling))
        tasks.create_task(_show(streams, screen, streaming))
        results = []
        for update in updates:
            await streams.reach(streams.slowest + reading)
            if await _until_ready(update, client.paused, screen):
                # so that the pause is none of the gaps of the update
                await streams.reach(streams.slowest + GOING)
            results.append(await _send(update, client, screen))
    return results


async def _until_ready(update: Update, pause: Pause, screen: Screen) -> bool:
    """The stories stand still meanwhile, where they are: they must not end before it comes.

    Whether they had to.
    """
    must_wait = not update.ready.done()
    if must_wait:
        screen.wait_for(update)
        async with pause():
            await asyncio.wait([update.ready])
    await update.ready
    return must_wait


async def _send(update: Update, client: AsyncClient, screen: Screen) -> UpdateResult:
    """What fails is a result, too."""
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
    """Progress is for the eye only: a status that does not come is left out."""
    while True:
        await asyncio.sleep(STATUS_EVERY_S)
        try:
            staging = (await client.status()).get("staging")
        except (InflightError, httpx.HTTPError):
            continue
        if staging:
            screen.show_staged(update, staging["bytes"])
