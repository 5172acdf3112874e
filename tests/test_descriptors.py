"""Without free file descriptors, calls are refused with the reason, and the server survives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from harness.server import PLAIN, Server, schedulers
from sglang_inflight.extensions.workers.forward import HERE
from tests.support import descriptors
from tests.support.checkpoint_engine import DEVICE
from tests.support.load import ENDLESS, more_tokens, start_running, until, update
from tests.support.routes import routes
from tests.support.updates import LIVE, by_value, serving
from tests.support.workers import workers

pytest_plugins = ["tests.support.fixtures"]

# the string is long enough to be passed as a file
LARGE: dict[str, Any] = {
    "serialized_named_tensors": [by_value({"model.norm.weight": torch.ones(1 << 16)})],
    **LIVE,
}


@contextmanager
def connected(server: Server) -> Iterator[httpx.Client]:
    """A connection opened before descriptors run out."""
    with httpx.Client(base_url=server.url, timeout=60, headers=server.headers, **PLAIN) as client:
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
        until("all is closed", lambda p=process, n=before: descriptors.count(p) <= n)  # type: ignore[misc]


def test_update_is_refused_when_the_front_end_has_no_descriptor(
    server: Server, checkpoints: Path
) -> None:
    process = psutil.Process(server.process.pid)
    streams = start_running(server, 2, tokens=ENDLESS)
    before = serving(server)
    with connected(server) as client:
        count = descriptors.count(process)
        with descriptors.none_left(process):
            for _ in range(3):
                expect_refused(client.post("/update_weights_from_tensor", json=LARGE))
        assert serving(server) == before
        more_tokens(streams)
        expect_recovered(server, checkpoints, {process: count})


def test_update_is_refused_when_a_scheduler_has_no_descriptor(
    server: Server, checkpoints: Path
) -> None:
    (rank,) = schedulers(server.process.pid)
    streams = start_running(server, 2, tokens=ENDLESS)
    before = serving(server)
    with connected(server) as client:
        count = descriptors.count(rank)
        with descriptors.none_left(rank):
            for path, body in {
                "/update_weights_from_disk": {"model_path": str(checkpoints / "v1")},
                "/update_weights_from_tensor": LARGE,
                "/update_weights_from_ipc": {"zmq_handles": {DEVICE: "ipc:///nowhere"}},
            }.items():
                expect_refused(client.post(path, json={**body, **LIVE}))
        assert serving(server) == before
        more_tokens(streams)
        expect_recovered(server, checkpoints, {rank: count})


def test_forwarded_call_is_refused_when_a_worker_has_no_descriptor(
    workers_server: Server, checkpoints: Path
) -> None:
    until("there are two workers", lambda: len(workers(workers_server)) == 2)
    both = workers(workers_server)
    before = serving(workers_server)
    with connected(workers_server) as client:
        counts = {worker: descriptors.count(worker) for worker in both}
        handed_on = [route for route in routes(workers_server) if route.path not in HERE]
        assert handed_on
        with descriptors.none_left(*both):
            for route in handed_on:
                expect_refused(client.request(route.method, route.path, json=LARGE))
        assert serving(workers_server) == before
        expect_recovered(workers_server, checkpoints, counts)
