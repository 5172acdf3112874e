"""Resident memory of processes: each one's peak, and the peak of the sum."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

# file pages are left out, because the kernel reclaims them on demand
_COUNTED = ("RssAnon:", "RssShmem:")
PERIOD_S = 0.01


def resident(process: int) -> int:
    """Return the bytes of a process's own and shared memory, or 0 if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(_COUNTED))
    return 0


class Resident:
    """A thread that samples the memory of named processes, above a baseline.

    Each process sharing memory counts the whole of it. Processes are sampled one after the other,
    so memory moving between two of them may count twice.
    """

    def __init__(self, baseline: int) -> None:
        """``baseline``: bytes of each process left out of the count."""
        self._baseline = baseline
        self._lock = threading.Lock()
        self._processes: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self._together = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def watch(self, name: str, process: int) -> None:
        with self._lock:
            self._processes[name] = process
            self._look()

    def peak(self, name: str) -> int:
        """Return the process's peak."""
        with self._lock:
            return self._peaks[name]

    @property
    def together(self) -> int:
        """Peak of the sum."""
        with self._lock:
            return self._together

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_S):
            with self._lock:
                self._look()

    def _look(self) -> None:
        found = {
            name: max(0, resident(process) - self._baseline)
            for name, process in self._processes.items()
        }
        for name, size in found.items():
            self._peaks[name] = max(size, self._peaks.get(name, 0))
        self._together = max(self._together, sum(found.values()))
