"""Share one event loop between several threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# How long a thread waits for its result before it checks whether the loop still runs.
POLL_S = 0.02


class _Work(Generic[T]):
    """Work of the loop with one waiting thread."""

    def __init__(self, work: Awaitable[T]) -> None:
        self.done: Future[T] = Future()
        self._work = work
        self._task: asyncio.Future[T] | None = None
        self._is_given_up = False

    def start(self) -> None:
        """Start the work. Called on the loop."""
        if self._is_given_up:
            close(self._work)
            return
        self._task = asyncio.ensure_future(self._work)
        self._task.add_done_callback(self._settle)

    def give_up(self) -> None:
        """Cancel the work: its thread has left. Called on the loop."""
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
    """``run_until_complete`` for many threads at once, with any driver of the loop.

    ``sglang.Engine`` runs its event loop only while one of its calls waits, and a second thread's
    call then fails ("this event loop is already running"). Here one thread drives the loop,
    holding ``_driving``, and the others hand it their work. After its own result the driver
    releases the lock; a waiting thread notices, takes the lock and drives on. A thread with its
    result never drives.

    If the loop's owner runs it, as ``asyncio.run`` does, all threads wait and none drives. The
    owner may start the loop between the check and the drive. The loop then refuses the drive, and
    no work is lost, because it has been handed over before.

    A thread running an event loop may not wait here. On this loop the work would never be done;
    another loop would be blocked.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._driving = threading.Lock()

    def run_until_complete(self, work: Awaitable[T]) -> T:
        """Do as ``loop.run_until_complete``, from any thread without a running event loop.

        Raises ``RuntimeError``, before ``work`` starts, if this thread runs an event loop or the
        loop is closed. An interrupt (Ctrl-C) of a thread cancels its work.
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
            with contextlib.suppress(RuntimeError):  # the loop is closed: the work has ended
                self._loop.call_soon_threadsafe(given.give_up)
            raise
        return given.done.result()

    def _drive_or_wait(self, done: Future[T]) -> None:
        if self._loop.is_closed():
            raise RuntimeError("the event loop was closed while a call waited for it")
        if self._loop.is_running() or not self._driving.acquire(blocking=False):
            wait_for({done}, timeout=POLL_S)
            return
        try:
            if not done.done():
                self._run(asyncio.wrap_future(_signal(done), loop=self._loop))
        except RuntimeError:
            # the loop's owner has started it meanwhile
            if not self._loop.is_running():
                raise
        finally:
            self._driving.release()

    def _run(self, work: Awaitable[T]) -> T:
        result: T = type(self._loop).run_until_complete(self._loop, work)
        return result


def is_nested(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this thread runs ``loop``, and ``nest_asyncio`` allows nested waits on it."""
    return asyncio._get_running_loop() is loop and hasattr(loop, "_nest_patched")


def refuse_where_a_loop_runs(hint: str) -> None:
    """Raise ``RuntimeError`` if this thread runs an event loop."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(f"this thread runs an event loop, and waiting would block it: {hint}")


def close(work: Awaitable[Any]) -> None:
    """Close a coroutine: Python warns about coroutines never awaited."""
    if hasattr(work, "close"):
        work.close()


def _signal(done: Future[Any]) -> Future[None]:
    """Return a future set when ``done`` ends, also on failure."""
    signal: Future[None] = Future()
    done.add_done_callback(lambda _: signal.set_result(None))
    return signal


def share(loop: asyncio.AbstractEventLoop) -> None:
    """Make ``loop.run_until_complete`` safe to call from several threads."""
    patched: Any = loop
    if not isinstance(getattr(patched.run_until_complete, "__self__", None), SharedLoop):
        patched.run_until_complete = SharedLoop(loop).run_until_complete
