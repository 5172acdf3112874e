"""Polls sends and receives of gloo between two ranks, which only a blocking wait ends."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sglang_inflight.threads import start_thread


class WaitedFor(dist.Work):
    """Sends and receives with a thread of their own, which waits for them.

    gloo does not say whether a receive from one rank has ended, and a wait with a time limit breaks
    all of its connections. The thread ends with the last of them, or with the first failure.
    """

    def __init__(self, works: Mapping[str, Any]) -> None:
        """``works``: each by a name for errors."""
        super().__init__()
        self._ended = threading.Event()
        self._failure: Exception | None = None

        def run() -> None:
            for name, work in works.items():
                try:
                    work.wait()
                except Exception as error:
                    self._failure = RuntimeError(f"{name}: {error}")
                    break
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
