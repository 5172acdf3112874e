"""Run coroutines and ``async with`` blocks for many servers at once, independently."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeVar

import anyio
import httpx

from sglang_inflight.client.report import Report
from sglang_inflight.vocabulary.answers import Answer
from sglang_inflight.vocabulary.errors import InflightError

T = TypeVar("T")
HowItEnded = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]

_WELL: HowItEnded = (None, None, None)


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
