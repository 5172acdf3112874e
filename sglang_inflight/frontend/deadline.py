"""When a call has taken too long."""

from __future__ import annotations

import time


class Deadline:
    """``seconds`` after it is made. Each call has its own, also in a session of many."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Above 0, also when it is over: who waits that long looks once."""
        return max(0.001, self._at - time.monotonic())

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._at
