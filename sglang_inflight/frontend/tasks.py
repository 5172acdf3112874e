"""Tasks that nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def keep(tasks: set[asyncio.Future[Any]], doing: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Begin ``doing``, and keep it among ``tasks`` until it has ended: the event loop itself
    keeps only a weak reference.
    """
    task = asyncio.ensure_future(doing)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def carry_through(tasks: set[asyncio.Future[Any]], doing: Coroutine[Any, Any, T]) -> T:
    """Its outcome. It goes on where the caller is gone: it cannot be called back."""
    return await asyncio.shield(keep(tasks, doing))
