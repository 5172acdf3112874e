"""Helpers of the front end's event loop: deadlines, background tasks, calls shared by callers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from sglang_inflight.vocabulary.errors import InflightError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Deadline:
    """A time limit, ``seconds`` after construction. Each call of a session has its own."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds left, always above 0: a wait at the deadline still looks once."""
        return max(0.001, self._at - time.monotonic())

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._at


def keep(tasks: set[asyncio.Future[Any]], doing: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start ``doing`` and keep its task in ``tasks``: the event loop's reference is weak."""
    task = asyncio.ensure_future(doing)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def carry_through(tasks: set[asyncio.Future[Any]], doing: Coroutine[Any, Any, T]) -> T:
    """Return an irrevocable step's outcome. The caller's cancellation does not stop the step."""
    return await asyncio.shield(keep(tasks, doing))


async def _nothing() -> None:
    """Give nothing back: the work leaves nothing behind."""


class SharedCall(Generic[T]):
    """Work started by its first caller; every caller receives the outcome.

    The work runs in a task of its own, so a caller may be cancelled without cancelling the work.
    The outcome exists some ticks of the event loop before a caller receives it, and callers may
    be cancelled in these ticks. So when the last caller is cancelled and no caller has received
    the outcome, the work is cancelled and its effect given back. A later caller waits for the
    end of ``give_back``, then starts the work anew.

    Lives on one event loop. Nothing else runs between two awaits, so at each tick a caller
    either waits or has received the outcome, and the count needs no lock.
    """

    def __init__(self) -> None:
        self._doing: asyncio.Future[T] | None = None
        self._give_back: Callable[[], Awaitable[None]] = _nothing
        # gives back the previous work, abandoned by all its callers
        self._given_up: asyncio.Future[None] | None = None
        self._waiting = 0
        self._is_received = False

    @property
    def is_over(self) -> bool:
        """Whether no caller waits, and no giving back is running."""
        return not self._waiting and (self._given_up is None or self._given_up.done())

    async def join(
        self,
        start: Callable[[], Awaitable[T]],
        give_back: Callable[[], Awaitable[None]] = _nothing,
    ) -> T:
        """Return the work's outcome; start the work if no other caller has.

        Only the first caller's ``start`` and ``give_back`` are called. ``give_back`` runs after
        work that is done, was cancelled halfway, or was cancelled before its start. Failed work
        cleans up by itself.
        """
        self._waiting += 1
        try:
            while self._given_up is not None and not self._given_up.done():
                await asyncio.wait({self._given_up})
            if self._doing is None:
                self._doing = asyncio.ensure_future(start())
                self._give_back, self._is_received = give_back, False
            outcome = await asyncio.shield(self._doing)
            self._is_received = True
            return outcome
        finally:
            self._waiting -= 1
            if not self._waiting and not self._is_received and not _has_failed(self._doing):
                await self._give_up()

    async def _give_up(self) -> None:
        doing, self._doing = self._doing, None
        if doing is None:
            return
        given_up = self._given_up = asyncio.ensure_future(_undo(doing, self._give_back))
        while not given_up.done():
            # a second cancellation of the same caller must not stop the giving back
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
        logger.warning("The effect of an abandoned call could not be given back: %s", error)


def _has_failed(doing: asyncio.Future[T] | None) -> bool:
    return (
        doing is not None
        and doing.done()
        and not doing.cancelled()
        and doing.exception() is not None
    )
