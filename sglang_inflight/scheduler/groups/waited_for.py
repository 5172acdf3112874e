"""Polls sends and receives between two ranks that only a blocking wait ends, such as gloo's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from sglang_inflight.threads import start_thread


class WaitedFor(dist.Work):
    """Sends and receives, each with a thread of its own that waits for it.

    gloo does not say whether a receive from one rank has ended, and a wait with a time limit breaks
    all of its connections. A thread ends with its receive, or with the connection.
    """

    def __init__(self, waits: Mapping[str, Callable[[], object]]) -> None:
        """``waits``: each by a name for errors. The work ends with all, or with a failure."""
        super().__init__()
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._left = len(waits)
        for name, wait in waits.items():
            start_thread(partial(self._wait_for, name, wait), name="inflight-receive")

    def _wait_for(self, name: str, wait: Callable[[], object]) -> None:
        failure: Exception | None = None
        try:
            wait()
        except Exception as error:
            failure = RuntimeError(f"{name}: {error}")
        with self._lock:
            self._left -= 1
            self._failure = self._failure or failure
            if self._failure is not None or not self._left:
                self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def exception(self) -> Any:
        return self._failure

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._ended.wait()
        if self._failure is not None:
            raise self._failure
        return True
