"""Something done again and again in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx

from sglang_inflight.errors import InflightError, Refused

logger = logging.getLogger(__name__)


@asynccontextmanager
async def repeating(
    what: str, call: Callable[[], Awaitable[object]], period_s: float
) -> AsyncIterator[None]:
    """Begin ``call`` every ``period_s`` seconds until the block ends, one after the other.

    It is over when a call is refused, because then there is nothing left to renew or to
    look at. After an error on the way, or an answer that is none, it goes on: a lease may
    still hold. A call that took longer than a period is followed by the next at once, so
    that there is time for that one within a lease.
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
