"""Threads that begin, or say that they cannot. Imports no SGLang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from sglang_inflight.errors import Refused

# busy cores take a moment, and a thread that lacks memory never begins
BEGIN_S = 10.0


class _Begun(threading.Event):
    """What ``Thread.start`` waits for, without an end where it is Python's own."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(BEGIN_S if timeout is None else timeout)


def start_thread(target: Callable[..., None], *args: Any, name: str) -> None:
    """Run ``target`` on a daemon thread. Raises ``Refused`` where it does not begin.

    A thread that finds no memory in its first lines ends before it has said that it began, and
    ``Thread.start`` waits for that without an end. The thread that wanted another one would be
    lost with it, and with the staging thread every later update. So the wait has an end here,
    and a thread that begins after it does nothing.
    """
    begun, unwanted = _Begun(), threading.Event()

    def run() -> None:
        if not unwanted.is_set():
            target(*args)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread._started = begun  # type: ignore[attr-defined]
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise Refused(f"no thread {name!r} can be started: {error or 'no memory'}") from error
    if not begun.is_set():
        unwanted.set()
        raise Refused(
            f"the thread {name!r} did not begin within {BEGIN_S:g} s: this process has no memory "
            "for it"
        )
