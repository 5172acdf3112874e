"""Polls a receive of gloo's from one rank, which only a blocking wait ends."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sglang_inflight.threads import start_thread


class WaitedFor(dist.Work):
    """A receive with a thread of its own, which waits for it.

    gloo does not say whether a receive from one rank has ended, and a wait with a time limit breaks
    all of its connections. The thread ends with the receive, or with the connection.
    """

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._ended = threading.Event()
        self._failure: Exception | None = None

        def run() -> None:
            try:
                work.wait()
            except Exception as error:
                self._failure = error
            self._ended.set()

        start_thread(run, name="inflight-receive")

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def exception(self) -> Any:
        return self._failure

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._ended.wait()
        if self._failure is not None:
            raise self._failure
        return True
