"""The same for many servers, at once: one that is silent keeps none of the others waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeVar

import anyio
import httpx

from sglang_inflight.answer import Answer
from sglang_inflight.client.report import Report
from sglang_inflight.errors import InflightError

T = TypeVar("T")
HowItEnded = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]

_WELL: HowItEnded = (None, None, None)


async def together(work: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Each to its end, whatever becomes of the others; then the first error is raised.

    Whoever cancels it cancels each, and waits until each has cleaned up.
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
    """An ``async with`` block of each server. Those not left before are left as the whole is."""

    def __init__(self) -> None:
        self._entered: dict[str, AbstractAsyncContextManager[Any]] = {}

    async def enter(self, url: str, block: AbstractAsyncContextManager[T]) -> T:
        entered = await block.__aenter__()
        self._entered[url] = block
        return entered

    async def leave(self, report: Report[Answer], urls: Collection[str]) -> None:
        """As blocks are left that ended well. The report says what each made of it."""
        await self._leave(_WELL, report, urls)

    async def __aexit__(self, *how: Any) -> None:
        """Does not raise what a block makes of a failure: the failure itself tells more."""
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
