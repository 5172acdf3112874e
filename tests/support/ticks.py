"""An event loop, turn by turn."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# loops between two collections of garbage
_LOOPS = 50
_count = itertools.count(1)


def run(play: Coroutine[Any, Any, T]) -> T:
    """Run on asyncio's own loop: SGLang sets uvloop for ``asyncio.run``, which hides turns."""
    if next(_count) % _LOOPS == 0:
        # ended tasks in cycles stay in asyncio's set of all tasks, which each loop's end looks at
        gc.collect()
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(play)


async def until_idle() -> None:
    """Run the loop until all tasks wait for a call or a timer."""
    loop: Any = asyncio.get_running_loop()
    await asyncio.sleep(0)
    while loop._ready:
        await asyncio.sleep(0)


async def tick(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def timers() -> list[asyncio.TimerHandle]:
    """Return the loop's pending timers."""
    loop: Any = asyncio.get_running_loop()
    return [timer for timer in loop._scheduled if not timer.cancelled()]
