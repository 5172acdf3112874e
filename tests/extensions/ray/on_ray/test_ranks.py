"""Servers on Ray: two ranks, two replicas, and two ranks on two nodes are updated and paused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.server import Server
from tests.support.load import (
    ENDLESS,
    Generation,
    pause,
    resume,
    settle,
    start_running,
    status,
    update,
)
from tests.support.pool import ServerPool
from tests.support.ray_cluster import ON_RAY, RayCluster, serve_on_ray
from tests.support.updates import (
    LIVE,
    Sender,
    expect_to_run_on,
    misshapen,
    refuse,
    serving,
    succeed,
)

pytest_plugins = ["tests.support.fixtures"]
pytestmark = ON_RAY

STREAMS = 2
KINDS = {
    "tp": ("--tp-size", "2"),
    "dp": ("--dp-size", "2"),
    "nodes": ("--tp-size", "2", "--nnodes", "2"),
}
# the driver's setting wins over the one of Ray's first node
SETTINGS = {"SGLANG_INFLIGHT_STAGING": "changes"}


@pytest.fixture(scope="module", params=KINDS)
def on_ray(
    request: pytest.FixtureRequest,
    pool: ServerPool,
    cluster: RayCluster,
    checkpoints: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    pool.discard()  # one server at a time
    log = tmp_path_factory.mktemp("on_ray") / "server.log"
    flags = KINDS[request.param]
    with serve_on_ray(cluster, checkpoints / "v0", *flags, log=log, env=SETTINGS) as server:
        yield server


@pytest.fixture
def server(on_ray: Server, checkpoints: Path) -> Server:
    """A running server that serves v0 and has no requests."""
    on_ray.post("/abort_weight_update", {})
    resume(on_ray)
    on_ray.post("/abort_request", {"abort_all": True})
    update(on_ray, checkpoints, 0, **LIVE)
    return on_ray


@pytest.fixture
def streams(server: Server) -> list[Generation]:
    return start_running(server, STREAMS, tokens=ENDLESS)


def test_settings_of_the_driver_reach_every_actor(server: Server) -> None:
    ranks = status(server)["ranks"]
    assert [rank["staging"]["mode"] for rank in ranks] == ["changes"] * 2


@pytest.mark.parametrize("source", ["disk", "tensor", "tensor_bucket", "distributed"])
def test_update_in_flight_changes_every_actor(
    server: Server, sender: Sender, streams: list[Generation], source: str
) -> None:
    receipt = succeed(sender.send(server, source, 1, ranks=2, weight_version="v1", **LIVE))
    assert [rank["success"] for rank in receipt["ranks"]] == [True, True]
    assert {label for _, _, label, _, _ in serving(server)} == {"v1"}
    expect_to_run_on(server, streams, [0, 1])


def test_refused_update_changes_no_actor(
    server: Server, streams: list[Generation], tmp_path: Path
) -> None:
    before = serving(server)
    wrong = {"model_path": str(misshapen(tmp_path / "v5")), **LIVE}
    refuse(server.post("/update_weights_from_disk", wrong), "model.norm.weight")
    assert serving(server) == before
    expect_to_run_on(server, streams, [0])


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort", "wait"])
def test_pause_freezes_every_actor(server: Server, mode: str) -> None:
    streams = start_running(server, STREAMS, tokens=30 if mode == "wait" else ENDLESS)
    answer = pause(server, mode)
    settle(server, streams)
    counted = {"in_place": "running", "retract": "retracted", "abort": "aborted"}.get(mode)
    if counted is not None:
        assert sum(rank[counted] for rank in answer["ranks"]) >= STREAMS
    assert [rank["state"] for rank in status(server)["ranks"]] == ["frozen", "frozen"]
    resume(server)
    if counted in ("running", "retracted"):
        expect_to_run_on(server, streams, [0])


def test_update_in_a_pause_and_rollback_reach_every_actor(
    server: Server, checkpoints: Path, streams: list[Generation]
) -> None:
    pause(server, "in_place")
    update(server, checkpoints, 1, flush_cache=False)
    resume(server)
    for stream in streams:
        stream.wait_for_tokens(stream.count + 5)
    succeed(server.post("/inflight/rollback", {}))
    expect_to_run_on(server, streams, [0, 1, 0])
