"""The show: four stories at once, and three updates in the middle of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from examples.stories.streams import Shelf
from examples.stories.styles import Style
from examples.stories.updates import Receipt

STATUS_EVERY_S = 0.5
# tokens after which every story goes on for certain
GOING = 3

Pause = Callable[[], AbstractAsyncContextManager[Any]]


@dataclass(frozen=True)
class Act:
    """One update: ``name`` says by which way ``version`` comes, which writes in ``style``.

    It can begin when ``ready`` is done.
    """

    name: str
    version: str
    checkpoint: Path
    style: Style
    ready: asyncio.Future[None]
    update: Callable[[], Awaitable[Receipt]]


@dataclass(frozen=True)
class Performance:
    act: Act
    receipt: Receipt
    started: float
    ended: float


class Screen(Protocol):
    def show_stories(self, shelf: Shelf) -> None: ...

    def wait_for(self, act: Act) -> None: ...

    def begin(self, act: Act) -> None: ...

    def show_staged(self, act: Act, nbytes: int) -> None: ...

    def end(self, performance: Performance) -> None: ...


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


async def play(
    client: httpx.AsyncClient,
    shelf: Shelf,
    acts: Sequence[Act],
    *,
    reading: int,
    pause: Pause,
    sampling: dict[str, Any],
    screen: Screen,
) -> list[Performance]:
    """Each version is read for ``reading`` tokens before the next update begins."""
    async with asyncio.TaskGroup() as tasks:
        telling = tasks.create_task(shelf.stream(client, sampling))
        tasks.create_task(_show(shelf, screen, telling))
        performances = []
        for act in acts:
            await shelf.reach(shelf.slowest + reading)
            if await _until_ready(act, pause, screen):
                # so that the pause is none of the gaps of the update
                await shelf.reach(shelf.slowest + GOING)
            performances.append(await _perform(act, client, screen))
    return performances


async def _until_ready(act: Act, pause: Pause, screen: Screen) -> bool:
    """The stories stand still meanwhile, where they are: they must not end before it comes.

    Whether they had to.
    """
    must_wait = not act.ready.done()
    if must_wait:
        screen.wait_for(act)
        async with pause():
            await asyncio.wait([act.ready])
    await act.ready
    return must_wait


async def _perform(act: Act, client: httpx.AsyncClient, screen: Screen) -> Performance:
    screen.begin(act)
    watching = asyncio.create_task(_watch_staging(act, client, screen))
    started = time.monotonic()
    try:
        receipt = await act.update()
    finally:
        watching.cancel()
    performance = Performance(act, receipt, started, time.monotonic())
    screen.end(performance)
    return performance


async def _show(shelf: Shelf, screen: Screen, telling: asyncio.Task[None]) -> None:
    while not telling.done():
        screen.show_stories(shelf)
        await asyncio.wait([telling], timeout=0.25)
    screen.show_stories(shelf)


async def _watch_staging(act: Act, client: httpx.AsyncClient, screen: Screen) -> None:
    """Progress is for the eye only: a status that does not come is left out."""
    while True:
        await asyncio.sleep(STATUS_EVERY_S)
        try:
            staging = (await client.get("/inflight/status")).json().get("staging")
        except (httpx.HTTPError, ValueError, AttributeError):
            continue
        if staging:
            screen.show_staged(act, staging["bytes"])
