"""Server processes without a free file descriptor."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from harness.server import PLAIN, Server
from tests.support.load import until, update
from tests.support.updates import LIVE, by_value

# the string is long enough to be passed as a file
LARGE: dict[str, Any] = {
    "serialized_named_tensors": [by_value({"model.norm.weight": torch.ones(1 << 16)})],
    **LIVE,
}


# a process opens these at its start, and closes none of them
EARLIEST = 10


@contextmanager
def none_left(*processes: psutil.Process) -> Iterator[None]:
    """Keep ``processes`` from opening files and accepting connections. Open ones stay open.

    A connection that closes meanwhile frees no number below the limit.
    """
    limits = {process: process.rlimit(resource.RLIMIT_NOFILE) for process in processes}
    try:
        for process, (_, most) in limits.items():
            least = min(_lowest_free(process), EARLIEST)
            process.rlimit(resource.RLIMIT_NOFILE, (least, most))
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


@contextmanager
def connected(server: Server) -> Iterator[httpx.Client]:
    """A connection opened before descriptors run out."""
    with httpx.Client(base_url=server.url, timeout=180, headers=server.headers, **PLAIN) as client:
        assert client.get("/inflight/status").status_code == 200
        yield client


def expect_refused(answer: httpx.Response) -> None:
    content = answer.json()
    assert (answer.status_code, content["error"]["type"]) == (503, "Exhausted"), content
    assert "Too many open files" in content["message"]
    assert "Nothing has changed" in content["message"]


def expect_recovered(
    server: Server, checkpoints: Path, processes: dict[psutil.Process, int]
) -> None:
    """Check that an update works and that ``processes`` have only their former descriptors open."""
    update(server, checkpoints, 1, **LIVE)
    for process, before in processes.items():
        until("all is closed", lambda p=process, n=before: count(p) <= n)  # type: ignore[misc]
