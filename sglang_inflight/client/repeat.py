"""Repeat a call in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx

from sglang_inflight.vocabulary.errors import InflightError, Refused

logger = logging.getLogger(__name__)


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
