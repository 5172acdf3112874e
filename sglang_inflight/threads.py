"""Start a thread, or fail within a time limit. Imports no SGLang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from sglang_inflight.vocabulary.errors import Refused

# busy cores delay a thread's start; a thread without memory never starts
BEGIN_S = 10.0


class _Begun(threading.Event):
    """The event awaited by ``Thread.start``. Python's own wait has no time limit."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(BEGIN_S if timeout is None else timeout)


def start_thread(target: Callable[..., None], *args: Any, name: str) -> None:
    """Run ``target`` on a daemon thread. Raises ``Refused`` if the thread does not start.

    A thread can run out of memory before it sets its started event. Python's ``Thread.start``
    would then wait forever. A hung staging thread would block every later update. The wait here
    has a time limit, and a thread started after the limit does nothing.
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
