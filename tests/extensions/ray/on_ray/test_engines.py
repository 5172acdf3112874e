"""Engines on Ray: ``RayEngine``, and ``sglang.Engine`` in an actor."""

from __future__ import annotations

from pathlib import Path

from harness import marker
from sglang_inflight.client import cover_exactly, read_spans
from tests.support.engine import run_script
from tests.support.examples import run
from tests.support.load import until
from tests.support.pool import ServerPool
from tests.support.ray_cluster import ON_RAY, RayCluster

pytestmark = ON_RAY


def test_engine_is_updated_while_it_generates_and_gives_back_its_actors(
    pool: ServerPool, cluster: RayCluster, checkpoints: Path, tmp_path: Path
) -> None:
    """Its ranks are on two nodes, in a group of the user's, with ``nnodes`` 1."""
    pool.discard()
    env = cluster.environment
    played = run_script("tests.support.ray_engine", checkpoints, tmp_path, env)
    assert played["ranks"] == 2
    spans = read_spans({"weight_versions": played["spans"]})
    assert cover_exactly(spans, len(played["tokens"]))
    assert [span.version for span in spans] == ["v0", "v1"]
    for version, span in enumerate(spans):
        assert set(played["tokens"][span.start : span.end]) == {marker.token(version)}
    until("the actors have ended", lambda: not cluster.actors())


def test_example_updates_an_engine_in_an_actor_from_another_actor(
    pool: ServerPool, cluster: RayCluster, checkpoints: Path, tmp_path: Path
) -> None:
    pool.discard()
    old, new = str(checkpoints / "v0"), str(checkpoints / "v1")
    env = cluster.environment
    lines = run(tmp_path, "ray_actors", "--model-path", old, "--new", new, env=env)
    assert "old -> new" in lines
    spans = [line for line in lines if line.startswith("tokens ")]
    assert [line.split(" by ")[1] for line in spans] == ["old", "new"]
