"""A scheduler's actor or its node dies: the server ends, like one with a dead scheduler process.

Each server after the first shows that the cluster takes a new start.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness import marker
from harness.server import Server
from tests.support.load import ENDLESS, pause, start_running, until, update
from tests.support.pool import ServerPool
from tests.support.ray_cluster import ON_RAY, RayCluster, ray_cluster, serve_on_ray
from tests.support.updates import (
    LIVE,
    Call,
    expect_served,
    serving,
    succeed,
    tensor_body,
    until_staging,
)

pytestmark = ON_RAY

# slow enough to die while the first tensors are staged
SLOW = {"SGLANG_INFLIGHT_PACE_BYTES_PER_S": "20000"}


@pytest.fixture
def server(
    pool: ServerPool, cluster: RayCluster, checkpoints: Path, tmp_path: Path
) -> Iterator[Server]:
    pool.discard()
    log = tmp_path / "server.log"
    flags = ("--tp-size", "2")
    with serve_on_ray(cluster, checkpoints / "v0", *flags, log=log, env=SLOW) as server:
        yield server


def while_decoding(server: Server, checkpoints: Path, actor: psutil.Process) -> Call:
    request = {"max_new_tokens": ENDLESS, "ignore_eos": True}
    call = Call(server, "/generate", {"input_ids": [5], "sampling_params": request})
    actor.kill()
    return call


def while_staging(server: Server, checkpoints: Path, actor: psutil.Process) -> Call:
    v1 = {"model_path": str(checkpoints / "v1"), **LIVE}
    call = Call(server, "/update_weights_from_disk", v1)
    until_staging(server, tensors=1)
    actor.kill()
    return call


def after_the_vote(server: Server, checkpoints: Path, actor: psutil.Process) -> Call:
    session = _seal(server)
    actor.kill()
    return Call(server, "/end_weight_update", session)


def at_the_commit(server: Server, checkpoints: Path, actor: psutil.Process) -> Call:
    session = _seal(server)
    # the commit reaches the other rank, and this one's socket
    actor.send_signal(signal.SIGSTOP)
    call = Call(server, "/end_weight_update", session)
    actor.kill()
    return call


def in_a_pause(server: Server, checkpoints: Path, actor: psutil.Process) -> Call:
    pause(server, "in_place")
    actor.kill()
    return Call(server, "/continue_generation", {})


def _seal(server: Server) -> dict[str, str]:
    session = {
        "session_id": succeed(server.post("/begin_weight_update", {"non_blocking": True}))[
            "session_id"
        ]
    }
    head = {"lm_head.weight": marker.tensors(1)["lm_head.weight"]}
    succeed(server.post("/update_weights_from_tensor", tensor_body(head, ranks=2, **session)))
    succeed(server.post("/seal_weight_update", session))
    return session


@pytest.mark.parametrize(
    "die", [while_decoding, while_staging, after_the_vote, at_the_commit, in_a_pause]
)
def test_server_ends_when_an_actor_dies(
    server: Server,
    cluster: RayCluster,
    checkpoints: Path,
    die: Callable[[Server, Path, psutil.Process], Call],
) -> None:
    running = start_running(server, 2, tokens=ENDLESS)
    (_, actor) = cluster.actors()
    call = die(server, checkpoints, actor)
    # an error, or the end of the connection
    until("the caller does not wait", lambda: call.is_answered)
    for generation in running:
        generation.wait_for_end()
    until("the server has ended", lambda: not server.is_alive())
    until("Ray has ended the other actor", lambda: not cluster.actors())
    assert "crashed with exit code" in server.log_text()


@pytest.mark.parametrize("lost", ["actor", "node"])
def test_two_nodes_serve_again_after_a_loss(
    pool: ServerPool, checkpoints: Path, tmp_path: Path, lost: str
) -> None:
    pool.discard()
    flags = ("--tp-size", "2", "--nnodes", "2")
    with ray_cluster(gpus=1) as cluster:
        second = cluster.add_node(gpus=1)
        log = tmp_path / "first.log"
        with serve_on_ray(cluster, checkpoints / "v0", *flags, log=log) as server:
            running = start_running(server, 2, tokens=ENDLESS)
            update(server, checkpoints, 1, **LIVE)
            for generation in running:
                generation.wait_for_tokens(generation.count + 5)
            assert {label for _, _, label, _, _ in serving(server)} == {"v1"}
            if lost == "node":
                cluster.remove_node(second)
            else:
                cluster.actors()[-1].kill()
            for generation in running:
                generation.wait_for_end()
            until("the server has ended", lambda: not server.is_alive())
            until("Ray has ended the other actor", lambda: not cluster.actors())
        if lost == "node":
            cluster.add_node(gpus=1)
        log = tmp_path / "second.log"
        with serve_on_ray(cluster, checkpoints / "v0", *flags, log=log) as server:
            expect_served(server, 0)
