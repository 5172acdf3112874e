"""An event loop, turn by turn."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(play: Coroutine[Any, Any, T]) -> T:
    """On asyncio's own loop: SGLang makes uvloop's the one that ``asyncio.run`` takes, and that
    shows no turns.
    """
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(play)


async def until_idle() -> None:
    """Until nothing on this loop can go on: all that is left waits for a call or a timer."""
    loop: Any = asyncio.get_running_loop()
    await asyncio.sleep(0)
    while loop._ready:
        await asyncio.sleep(0)


async def tick(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def timers() -> list[asyncio.TimerHandle]:
    """Those of this loop that are still to go off."""
    loop: Any = asyncio.get_running_loop()
    return [timer for timer in loop._scheduled if not timer.cancelled()]
