"""Deadline of a call."""

from __future__ import annotations

import time


class Deadline:
    """A time limit, ``seconds`` after construction. Each call of a session has its own."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds left, always above 0: a wait at the deadline still looks once."""
        return max(0.001, self._at - time.monotonic())

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._at
