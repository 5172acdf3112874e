"""Background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def keep(tasks: set[asyncio.Future[Any]], doing: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start ``doing`` and keep its task in ``tasks``: the event loop's reference is weak."""
    task = asyncio.ensure_future(doing)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def carry_through(tasks: set[asyncio.Future[Any]], doing: Coroutine[Any, Any, T]) -> T:
    """Return an irrevocable step's outcome. The caller's cancellation does not stop the step."""
    return await asyncio.shield(keep(tasks, doing))
