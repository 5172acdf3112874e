"""Without free file descriptors, calls are refused with the reason, and the server survives."""

from __future__ import annotations

from pathlib import Path

import psutil

from harness.server import Server, schedulers
from tests.support import descriptors
from tests.support.checkpoint_engine import DEVICE
from tests.support.descriptors import LARGE, connected, expect_recovered, expect_refused
from tests.support.load import ENDLESS, more_tokens, start_running
from tests.support.updates import LIVE, serving

pytest_plugins = ["tests.support.fixtures"]


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
