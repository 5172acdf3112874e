"""Server processes without a free file descriptor."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


@contextmanager
def none_left(*processes: psutil.Process) -> Iterator[None]:
    """Keep ``processes`` from opening files and accepting connections. Open ones stay open."""
    limits = {process: process.rlimit(resource.RLIMIT_NOFILE) for process in processes}
    try:
        for process, (_, most) in limits.items():
            process.rlimit(resource.RLIMIT_NOFILE, (_lowest_free(process), most))
        yield
    finally:
        for process, limit in limits.items():
            process.rlimit(resource.RLIMIT_NOFILE, limit)


def count(process: psutil.Process) -> int:
    return len(_open(process))


def _lowest_free(process: psutil.Process) -> int:
    taken = _open(process)
    return next(number for number in range(len(taken) + 1) if number not in taken)


def _open(process: psutil.Process) -> set[int]:
    return {int(entry.name) for entry in Path(f"/proc/{process.pid}/fd").iterdir()}
