"""Several threads, one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# How long a thread waits for its result before it looks whether the loop still runs.
LOOK_S = 0.02


class _Work(Generic[T]):
    """What one thread waits for, and the loop does."""

    def __init__(self, work: Awaitable[T]) -> None:
        self.done: Future[T] = Future()
        self._work = work
        self._task: asyncio.Future[T] | None = None
        self._is_given_up = False

    def start(self) -> None:
        """On the loop."""
        if self._is_given_up:
            close(self._work)
            return
        self._task = asyncio.ensure_future(self._work)
        self._task.add_done_callback(self._settle)

    def give_up(self) -> None:
        """On the loop: nobody waits any more."""
        self._is_given_up = True
        if self._task is not None:
            self._task.cancel()

    def _settle(self, finished: asyncio.Future[T]) -> None:
        if finished.cancelled():
            self.done.cancel()
        elif (error := finished.exception()) is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(finished.result())


class SharedLoop:
    """``run_until_complete`` for many threads at once, whoever runs the loop.

    ``sglang.Engine`` runs its event loop only while a call of it waits, and a second
    thread's call then fails ("this event loop is already running"). Here one thread
    drives the loop, holding ``_driving``, and the others hand their work to it. When the
    driver has its own result it lets go; a thread that still waits notices, takes the
    lock and drives on. A thread whose result is ready never drives.

    Where the loop is run by its owner, as ``asyncio.run`` does, nobody drives it from
    here: all wait. It may begin to run between the look and the drive; then the drive is
    refused by the loop, with nothing lost, because the work has been handed over already.

    A thread that runs an event loop may not wait here: if it is this one, the work would
    never be done, and if it is another one, all that it runs would stand still.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._driving = threading.Lock()

    def run_until_complete(self, work: Awaitable[T]) -> T:
        """What ``loop.run_until_complete`` does, from any thread that runs no event loop.

        Raises ``RuntimeError`` before anything of ``work`` is done where this thread does, or
        where the loop is closed. A thread that is interrupted (Ctrl-C) cancels its work.
        """
        try:
            if is_nested(self._loop):
                return self._run(work)
            refuse_where_a_loop_runs("await the engine's async methods there")
            given = _Work(work)
            self._loop.call_soon_threadsafe(given.start)
        except RuntimeError:
            close(work)
            raise
        try:
            while not given.done.done():
                self._drive_or_wait(given.done)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # closed: nothing of it runs on
                self._loop.call_soon_threadsafe(given.give_up)
            raise
        return given.done.result()

    def _drive_or_wait(self, done: Future[T]) -> None:
        if self._loop.is_closed():
            raise RuntimeError("the event loop was closed while a call waited for it")
        if self._loop.is_running() or not self._driving.acquire(blocking=False):
            wait_for({done}, timeout=LOOK_S)
            return
        try:
            if not done.done():
                self._run(asyncio.wrap_future(_signal(done), loop=self._loop))
        except RuntimeError:
            # its owner was quicker
            if not self._loop.is_running():
                raise
        finally:
            self._driving.release()

    def _run(self, work: Awaitable[T]) -> T:
        result: T = type(self._loop).run_until_complete(self._loop, work)
        return result


def is_nested(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this thread runs ``loop``, which ``nest_asyncio`` has made wait for itself."""
    return asyncio._get_running_loop() is loop and hasattr(loop, "_nest_patched")


def refuse_where_a_loop_runs(hint: str) -> None:
    """Raise ``RuntimeError`` where this thread runs an event loop."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(f"this thread runs an event loop, which would stand still: {hint}")


def close(work: Awaitable[Any]) -> None:
    """A coroutine that is never awaited would say so when it is collected."""
    if hasattr(work, "close"):
        work.close()


def _signal(done: Future[Any]) -> Future[None]:
    """Done when ``done`` is, whatever its outcome."""
    signal: Future[None] = Future()
    done.add_done_callback(lambda _: signal.set_result(None))
    return signal


def share(loop: asyncio.AbstractEventLoop) -> None:
    """Make ``loop.run_until_complete`` safe to call from several threads."""
    patched: Any = loop
    if not isinstance(getattr(patched.run_until_complete, "__self__", None), SharedLoop):
        patched.run_until_complete = SharedLoop(loop).run_until_complete
