"""How much memory processes have taken, each at most and all together."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

# pages of files are left out: the kernel takes them back when it wants to
_COUNTED = ("RssAnon:", "RssShmem:")
PERIOD_S = 0.01


def resident(process: int) -> int:
    """Bytes of its own, and of memory that it shares with others; 0 where it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(_COUNTED))
    return 0


class Resident:
    """Looks again and again, in a thread, at processes that have names, beyond what they had.

    Shared memory counts for each that has it. Processes are looked at one after the other, so
    where one lets go and another takes at once, a sum may have both.
    """

    def __init__(self, baseline: int) -> None:
        """``baseline``: bytes that each process is allowed to have."""
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
        """The most that one has had."""
        with self._lock:
            return self._peaks[name]

    @property
    def together(self) -> int:
        """The most that all have had at one time."""
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
