"""A check that idle processes use no core."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil

WINDOW_S = 2.0
WINDOWS = 5
# percent of a core, without any call
MOST_PERCENT = 10


def expect_nothing_spins(processes: Sequence[psutil.Process]) -> None:
    """Check that no process spins: a spinning loop is busy in every window.

    Other work ends, so a slow machine passes in a later window.
    """
    busy: dict[int, float] = {}
    for _ in range(WINDOWS):
        for process in processes:
            process.cpu_percent()  # begins to count
        time.sleep(WINDOW_S)
        busy = {
            process.pid: percent
            for process in processes
            if (percent := process.cpu_percent()) >= MOST_PERCENT
        }
        if not busy:
            return
    spinning = {process.pid: process.cmdline() for process in processes if process.pid in busy}
    raise AssertionError(f"of a core, in percent: {busy}, of {spinning}")
