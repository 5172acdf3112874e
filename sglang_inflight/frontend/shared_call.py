"""Something that is done once, however many callers wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from sglang_inflight.errors import InflightError

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def _nothing() -> None:
    """For work that leaves nothing behind."""


class SharedCall(Generic[T]):
    """The first caller starts it, and all hear how it ended.

    It belongs to nobody's task, so a caller who leaves takes it from nobody. Its outcome belongs
    to those who hear it. An outcome is there some ticks of the event loop before anybody has
    heard it, and a caller may leave in these. So the last one who leaves, where none has heard
    it, gives the call up: it is cancelled, and what it has done by then is given back. Whoever
    comes after that waits until it is given back, and starts it anew.

    Lives on one event loop. Between two awaits nothing else runs, so a caller is at each tick
    either among those who wait or has heard, and the count needs no lock.
    """

    def __init__(self) -> None:
        self._doing: asyncio.Future[T] | None = None
        self._give_back: Callable[[], Awaitable[None]] = _nothing
        # what is done about the one before, which everybody left
        self._given_up: asyncio.Future[None] | None = None
        self._waiting = 0
        self._is_heard = False

    @property
    def is_over(self) -> bool:
        """Nobody waits for it, and nothing of it goes on."""
        return not self._waiting and (self._given_up is None or self._given_up.done())

    async def join(
        self,
        start: Callable[[], Awaitable[T]],
        give_back: Callable[[], Awaitable[None]] = _nothing,
    ) -> T:
        """Its outcome, whoever started it.

        Only the first caller's ``start`` and ``give_back`` are called. ``give_back`` finds the
        work done, cancelled in its middle, or cancelled before it began; not failed, because
        work that fails cleans up by itself.
        """
        self._waiting += 1
        try:
            while self._given_up is not None and not self._given_up.done():
                await asyncio.wait({self._given_up})
            if self._doing is None:
                self._doing = asyncio.ensure_future(start())
                self._give_back, self._is_heard = give_back, False
            outcome = await asyncio.shield(self._doing)
            self._is_heard = True
            return outcome
        finally:
            self._waiting -= 1
            if not self._waiting and not self._is_heard and not _has_failed(self._doing):
                await self._give_up()

    async def _give_up(self) -> None:
        doing, self._doing = self._doing, None
        if doing is None:
            return
        given_up = self._given_up = asyncio.ensure_future(_undo(doing, self._give_back))
        while not given_up.done():
            # a caller who is cancelled again is on its way out already
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({given_up})


async def _undo(doing: asyncio.Future[T], give_back: Callable[[], Awaitable[None]]) -> None:
    doing.cancel()
    await asyncio.wait({doing})
    if _has_failed(doing):
        return
    try:
        await give_back()
    except InflightError as error:
        logger.warning("What nobody waits for any more could not be given back: %s", error)


def _has_failed(doing: asyncio.Future[T] | None) -> bool:
    return (
        doing is not None
        and doing.done()
        and not doing.cancelled()
        and doing.exception() is not None
    )
