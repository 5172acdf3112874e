"""What waits at the end, and what comes after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight.errors import Conflict, Gone, OutcomeUnknown
from sglang_inflight.frontend.lifetime import Lifetime

Play = Callable[[Lifetime, "asyncio.Future[str]"], Coroutine[Any, Any, str]]


def play(doing: Play) -> str:
    """What comes of ``doing`` with a lifetime, and with something that others wait for."""

    async def run() -> str:
        loop = asyncio.get_running_loop()
        manager: Any = SimpleNamespace(event_loop=loop, rid_to_state={})
        return await doing(Lifetime(manager), loop.create_future())

    return asyncio.run(run())


async def attended(lifetime: Lifetime, awaited: asyncio.Future[str]) -> asyncio.Task[str]:
    """Somebody who waits."""

    async def wait() -> str:
        return await awaited

    task = asyncio.ensure_future(lifetime.unless_shut_down(wait()))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


def test_an_answer() -> None:
    async def doing(lifetime: Lifetime, awaited: asyncio.Future[str]) -> str:
        waiting = await attended(lifetime, awaited)
        awaited.set_result("done")
        return await waiting

    assert play(doing) == "done"


def test_the_end_comes_first() -> None:
    async def doing(lifetime: Lifetime, awaited: asyncio.Future[str]) -> str:
        waiting = await attended(lifetime, awaited)
        lifetime.end("it was shut down")
        return await waiting

    with pytest.raises(OutcomeUnknown, match="it was shut down before this call had its answer"):
        play(doing)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_the_end_takes_along_what_was_waited_for(how: str) -> None:
    """As SGLang cancels its tasks, which is no word about the call."""

    async def doing(lifetime: Lifetime, awaited: asyncio.Future[str]) -> str:
        waiting = await attended(lifetime, awaited)
        lifetime.end("it was shut down")
        if how == "cancelled":
            awaited.cancel()
        else:
            awaited.set_exception(Gone("nobody is there to clean up"))
        return await waiting

    with pytest.raises(OutcomeUnknown):
        play(doing)


def test_an_answer_that_came_before_the_end_counts() -> None:
    async def doing(lifetime: Lifetime, awaited: asyncio.Future[str]) -> str:
        waiting = await attended(lifetime, awaited)
        awaited.set_result("done")
        await asyncio.sleep(0)
        lifetime.end("it was shut down")
        return await waiting

    assert play(doing) == "done"


def test_a_refusal_is_handed_on() -> None:
    async def doing(lifetime: Lifetime, awaited: asyncio.Future[str]) -> str:
        waiting = await attended(lifetime, awaited)
        awaited.set_exception(Conflict("another one is going on"))
        return await waiting

    with pytest.raises(Conflict):
        play(doing)


def test_what_comes_after_the_end_is_not_begun() -> None:
    begun = []

    async def doing(lifetime: Lifetime, _: asyncio.Future[str]) -> str:
        async def begin() -> str:
            begun.append(1)
            return "done"

        lifetime.end("it was shut down")
        return await lifetime.unless_shut_down(begin())

    with pytest.raises(Gone, match="it was shut down"):
        play(doing)
    assert not begun
