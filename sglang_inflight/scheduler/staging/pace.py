"""Staging gives way to decoding."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from threadpoolctl import threadpool_limits

# Without a step for this long the loop is idle, paused or in a long prefill: go on.
LONGEST_WAIT_S = 0.1


# Of a step of some milliseconds: a few on a CPU, whose cores and memory decoding shares, and
# less than one of a GPU's bandwidth.
_CPU_BUDGET = 48 << 20
_DEVICE_BUDGET = 1 << 30


def choose_budget(wanted: int | None, device: str) -> int:
    """Bytes per step: what is set, or what suits the kind of device (``cpu``, ``cuda``…)."""
    if wanted is not None:
        return wanted
    return _CPU_BUDGET if device == "cpu" else _DEVICE_BUDGET


class Pace:
    """A budget of bytes touched per scheduler step.

    The staging thread spends; each step of the loop refills. The loop never waits: it
    sets an event.
    """

    def __init__(self, bytes_per_step: int, is_busy: Callable[[], bool]) -> None:
        self._bytes_per_step = bytes_per_step
        self._is_busy = is_busy
        self._left = bytes_per_step
        self._stepped = threading.Event()

    def tick(self) -> None:
        """The loop makes a step. Called by the scheduler's thread."""
        self._stepped.set()

    def spend(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more may be staged. Called by the staging thread."""
        if self._bytes_per_step == 0:
            return
        self._left -= nbytes
        while self._left <= 0:
            self._stepped.clear()
            if not self._is_busy() or not self._stepped.wait(LONGEST_WAIT_S):
                self._left = self._bytes_per_step
                return
            self._left += self._bytes_per_step


def yield_cores(niceness: int) -> None:
    """Make the calling thread the least of those that want a core.

    On a CPU server decoding and staging share the cores. One thread for torch's loops,
    and a lower priority if one is set, which Linux keeps per thread. A thread that waits for
    a core may be holding the interpreter, which then nobody has: so none is set as a rule.
    """
    threadpool_limits(limits=1, user_api="openmp")
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
