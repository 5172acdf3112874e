"""Several threads, one event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

# How long a thread waits for its result before it looks whether the loop still runs.
LOOK_S = 0.02


class SharedLoop:
    """``run_until_complete`` for many threads at once.

    ``sglang.Engine`` runs its event loop only while a call of it waits, and a second
    thread's call then fails ("this event loop is already running"). Here one thread
    drives the loop, holding ``_driving``, and the others hand their work to it. When the
    driver has its own result it lets go; a thread that still waits notices, takes the
    lock and drives on. A thread whose result is ready never drives.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._run = loop.run_until_complete
        self._driving = threading.Lock()

    def run_until_complete(self, work: Awaitable[T]) -> T:
        """What ``loop.run_until_complete`` does, from any thread but the driver's own."""
        done: Future[T] = Future()
        self._loop.call_soon_threadsafe(self._start, work, done)
        while not done.done():
            if not self._driving.acquire(timeout=LOOK_S):
                continue
            try:
                if not done.done():
                    self._run(asyncio.wrap_future(_signal(done), loop=self._loop))
            finally:
                self._driving.release()
        return done.result()

    def _start(self, work: Awaitable[T], done: Future[T]) -> None:
        task = asyncio.ensure_future(work, loop=self._loop)
        task.add_done_callback(lambda finished: _settle(finished, done))


def _settle(finished: asyncio.Future[T], done: Future[T]) -> None:
    if finished.cancelled():
        done.cancel()
    elif (error := finished.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(finished.result())


def _signal(done: Future[Any]) -> Future[None]:
    """Done when ``done`` is, whatever its outcome."""
    signal: Future[None] = Future()
    done.add_done_callback(lambda _: signal.set_result(None))
    return signal


def share(loop: Any) -> None:
    """Make ``loop.run_until_complete`` safe to call from several threads."""
    if not hasattr(loop.run_until_complete, "__self__") or not isinstance(
        loop.run_until_complete.__self__, SharedLoop
    ):
        loop.run_until_complete = SharedLoop(loop).run_until_complete
