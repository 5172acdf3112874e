"""Run coroutines beside each other: once for many servers, or again and again in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar

import anyio
import httpx

from sglang_inflight.client.report import Report
from sglang_inflight.vocabulary.answers import Answer
from sglang_inflight.vocabulary.errors import InflightError, Refused

T = TypeVar("T")
HowItEnded = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]

_WELL: HowItEnded = (None, None, None)
logger = logging.getLogger(__name__)


async def together(work: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run all coroutines to their ends, then raise the first error.

    A cancellation cancels all, and waits until each has cleaned up.
    """
    tasks = [asyncio.create_task(one) for one in work]
    if not tasks:
        return
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait(tasks)
        raise
    for task in tasks:
        task.result()


class ContextGroup(AbstractAsyncContextManager["ContextGroup"]):
    """One ``async with`` block per server. ``__aexit__`` leaves the blocks still entered."""

    def __init__(self) -> None:
        self._entered: dict[str, AbstractAsyncContextManager[Any]] = {}

    async def enter(self, url: str, block: AbstractAsyncContextManager[T]) -> T:
        entered = await block.__aenter__()
        self._entered[url] = block
        return entered

    async def leave(self, report: Report[Answer], urls: Collection[str]) -> None:
        """Leave the blocks of ``urls`` without an error. The report has each one's outcome."""
        await self._leave(_WELL, report, urls)

    async def __aexit__(self, *how: Any) -> None:
        """Leave all entered blocks. Errors on leaving are dropped: the first failure tells more."""
        with anyio.CancelScope(shield=how != _WELL):
            await self._leave(how, Report("resume"), list(self._entered))

    async def _leave(self, how: HowItEnded, report: Report[Answer], urls: Collection[str]) -> None:
        entered = {url: self._entered.pop(url) for url in urls}

        async def leave(url: str, block: AbstractAsyncContextManager[Any]) -> None:
            try:
                await block.__aexit__(*how)
            except (InflightError, httpx.HTTPError) as error:
                report.failures[url] = error
            else:
                report.answers[url] = Answer()

        await together(leave(url, block) for url, block in entered.items())


@asynccontextmanager
async def repeating(
    what: str, call: Callable[[], Awaitable[object]], period_s: float
) -> AsyncIterator[None]:
    """Start ``call`` every ``period_s`` seconds until the block ends, one call at a time.

    A refused call ends the repetition: nothing is left to renew or to look at. After any other
    error the repetition goes on, because a lease may still hold. A call longer than a period is
    followed by the next one at once, to leave that one time within the lease.
    """

    async def repeat() -> None:
        clock = asyncio.get_running_loop().time
        due = clock() + period_s
        while True:
            await asyncio.sleep(due - clock())
            due = clock() + period_s
            try:
                await call()
            except Refused as error:
                logger.warning("%s is over: %s", what, error)
                return
            except (InflightError, httpx.HTTPError) as error:
                logger.warning("%s failed, trying again: %r", what, error)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, Exception):
            logger.error("%s failed", what, exc_info=outcome)
