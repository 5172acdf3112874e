"""Waiting calls at a shutdown, and calls after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight.frontend.aio import Lifetime
from sglang_inflight.vocabulary.errors import Conflict, Gone, OutcomeUnknown

Play = Callable[[Lifetime, "asyncio.Future[str]"], Coroutine[Any, Any, str]]


def play(doing: Play) -> str:
    """Run ``doing`` with a lifetime and a future to wait for."""

    async def run() -> str:
        loop = asyncio.get_running_loop()
        manager: Any = SimpleNamespace(event_loop=loop, rid_to_state={})
        return await doing(Lifetime(manager), loop.create_future())

    return asyncio.run(run())


async def wait_begun(lifetime: Lifetime, awaited: asyncio.Future[str]) -> asyncio.Task[str]:
    """Start a task waiting for ``awaited``."""

    async def wait() -> str:
        return await awaited

    task = asyncio.ensure_future(lifetime.unless_shut_down(wait()))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


def test_unless_shut_down_returns_answer() -> None:
    async def doing(lifetime: Lifetime, awaited: asyncio.Future[str]) -> str:
        waiting = await wait_begun(lifetime, awaited)
        awaited.set_result("done")
        return await waiting

    assert play(doing) == "done"


def test_shutdown_before_the_answer_is_outcome_unknown() -> None:
    async def doing(lifetime: Lifetime, awaited: asyncio.Future[str]) -> str:
        waiting = await wait_begun(lifetime, awaited)
        lifetime.end("it was shut down")
        return await waiting

    with pytest.raises(OutcomeUnknown, match="it was shut down before this call had its answer"):
        play(doing)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_shutdown_hides_error_of_awaited_call(how: str) -> None:
    """SGLang cancels its tasks at a shutdown, whatever the outcome of the call."""

    async def doing(lifetime: Lifetime, awaited: asyncio.Future[str]) -> str:
        waiting = await wait_begun(lifetime, awaited)
        lifetime.end("it was shut down")
        if how == "cancelled":
            awaited.cancel()
        else:
            awaited.set_exception(Gone("nobody is there to clean up"))
        return await waiting

    with pytest.raises(OutcomeUnknown):
        play(doing)


def test_answer_before_shutdown_is_returned() -> None:
    async def doing(lifetime: Lifetime, awaited: asyncio.Future[str]) -> str:
        waiting = await wait_begun(lifetime, awaited)
        awaited.set_result("done")
        await asyncio.sleep(0)
        lifetime.end("it was shut down")
        return await waiting

    assert play(doing) == "done"


def test_unless_shut_down_raises_callers_error() -> None:
    async def doing(lifetime: Lifetime, awaited: asyncio.Future[str]) -> str:
        waiting = await wait_begun(lifetime, awaited)
        awaited.set_exception(Conflict("another one is going on"))
        return await waiting

    with pytest.raises(Conflict):
        play(doing)


def test_call_after_shutdown_is_not_begun() -> None:
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
