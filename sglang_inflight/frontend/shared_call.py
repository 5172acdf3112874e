"""Something that is done once, however many callers wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedCall(Generic[T]):
    """The first caller starts it, and all hear how it ended.

    It belongs to nobody's task, so a caller who leaves takes it from nobody. When the last
    one has left it is cancelled, because then nobody wants it any more. Lives on one event
    loop; between two awaits nothing else runs, so the count needs no lock.
    """

    def __init__(self) -> None:
        self._doing: asyncio.Future[T] | None = None
        self._waiting = 0

    @property
    def is_awaited(self) -> bool:
        return self._waiting > 0

    async def join(self, start: Callable[[], Awaitable[T]]) -> T:
        """Its outcome, whoever started it. ``start`` is called by the first caller only."""
        if self._doing is None:
            self._doing = asyncio.ensure_future(start())
        doing = self._doing
        self._waiting += 1
        try:
            return await asyncio.shield(doing)
        finally:
            self._waiting -= 1
            if not self._waiting and not doing.done():
                doing.cancel()
                # its clean-up is done when this is
                await asyncio.wait({doing})
                if not doing.cancelled():
                    # it ended in spite of that: seen, and of no use to anybody
                    doing.exception()
