"""The scheduler's memory, watched from outside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil

POLL_S = 0.05  # interval between looks


@dataclass
class Memory:
    """The scheduler's bytes: at first, and the most since.

    ``own`` leaves out pages shared with the page cache or the trainer.
    """

    process: psutil.Process
    own: int = 0
    all: int = 0
    first_own: int = 0
    first_all: int = 0

    def look(self) -> None:
        info = self.process.memory_info()
        self.own = max(self.own, info.rss - info.shared)
        self.all = max(self.all, info.rss)

    def begin(self) -> None:
        self.forget_peak()
        self.first_own, self.first_all = self.own, self.all

    def forget_peak(self) -> None:
        self.own = self.all = 0
        self.look()


@asynccontextmanager
async def watched(memory: Memory, every_s: float = POLL_S) -> AsyncIterator[None]:
    """Look at ``memory`` during the block."""

    async def watch() -> None:
        while True:
            memory.look()
            await asyncio.sleep(every_s)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
