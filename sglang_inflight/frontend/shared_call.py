"""Something that is done once, however many callers wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedCall(Generic[T]):
    """The first caller starts it, and all hear how it ended.

    It belongs to nobody's task, so a caller who leaves takes it from nobody. When the last
    one has left it is cancelled, because then nobody wants it any more; whoever comes after
    that waits until it has cleaned up, and starts it anew. Lives on one event loop; between
    two awaits nothing else runs, so the count needs no lock.
    """

    def __init__(self) -> None:
        self._doing: asyncio.Future[T] | None = None
        # the one before, which everybody left
        self._given_up: asyncio.Future[T] | None = None
        self._waiting = 0

    @property
    def is_over(self) -> bool:
        """Nobody waits for it, and nothing of it goes on."""
        return not self._waiting and (self._given_up is None or self._given_up.done())

    async def join(self, start: Callable[[], Awaitable[T]]) -> T:
        """Its outcome, whoever started it. ``start`` is called by the first caller only."""
        self._waiting += 1
        try:
            while self._given_up is not None and not self._given_up.done():
                await asyncio.wait({self._given_up})
            if self._doing is None:
                self._doing = asyncio.ensure_future(start())
            return await asyncio.shield(self._doing)
        finally:
            self._waiting -= 1
            doing = self._doing
            if not self._waiting and doing is not None and not doing.done():
                self._doing, self._given_up = None, doing
                doing.cancel()
                # its clean-up is done when this is
                await asyncio.wait({doing})
                if not doing.cancelled():
                    # it ended in spite of that: seen, and of no use to anybody
                    doing.exception()
