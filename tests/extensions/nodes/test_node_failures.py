"""Two nodes started for a single test: a dying node, and a node that differs from the other."""

from __future__ import annotations

import contextlib
from pathlib import Path

import httpx
import pytest

from harness import marker
from sglang_inflight import inactive
from tests.support.load import (
    ENDLESS,
    expect_all_go_on,
    pause,
    start_running,
    status,
    until,
    update,
    versions_of,
)
from tests.support.nodes import nodes_environment, serve_nodes
from tests.support.pool import ServerPool
from tests.support.updates import expect_served, succeed, tensor_body

FLAGS = ("--weight-version", "v0")


@pytest.mark.parametrize("phase", ["sealed", "paused"])
def test_waiting_caller_gets_an_answer_when_a_node_dies(
    pool: ServerPool, checkpoints: Path, tmp_path: Path, phase: str
) -> None:
    """SGLang's remaining ranks cannot go on."""
    pool.discard()
    with serve_nodes(checkpoints / "v0", *FLAGS, folder=tmp_path, env=nodes_environment()) as nodes:
        server = nodes.first
        start_running(server, 1, tokens=ENDLESS)
        if phase == "sealed":
            begun = succeed(server.post("/begin_weight_update", {"non_blocking": True}))
            session = {"session_id": begun["session_id"]}
            body = tensor_body(marker.tensors(1), ranks=2, **session)
            succeed(server.post("/update_weights_from_tensor", body))
            succeed(server.post("/seal_weight_update", session))
            path, last = "/end_weight_update", session
        else:
            pause(server, "in_place")
            path, last = "/continue_generation", {}
        nodes.kill_second()
        # an error answer, or a connection closed by the server's exit
        with contextlib.suppress(httpx.HTTPError):
            answer = server.post(path, last)
            assert answer["status_code"] in (500, 503, 504), answer


def test_node_without_the_package_is_named_at_the_start(
    pool: ServerPool, checkpoints: Path, tmp_path: Path
) -> None:
    pool.discard()
    nodes = serve_nodes(
        checkpoints / "v0",
        *FLAGS,
        folder=tmp_path,
        env=nodes_environment(),
        second_env={inactive.VARIABLE: "the test says so"},
    )
    with pytest.raises(RuntimeError, match="node 1 did not report"), nodes:
        pass


@pytest.mark.parametrize(("name", "value"), [("PD_MISMATCH", "abort"), ("REQUIRE_UPDATE", "1")])
def test_node_with_other_settings_is_named_at_the_start(
    pool: ServerPool, checkpoints: Path, tmp_path: Path, name: str, value: str
) -> None:
    pool.discard()
    setting = f"SGLANG_INFLIGHT_{name}"
    nodes = serve_nodes(
        checkpoints / "v0",
        *FLAGS,
        folder=tmp_path,
        env=nodes_environment(),
        second_env={setting: value},
    )
    with pytest.raises(RuntimeError, match=f"{setting} is .* on node 0 and .* on node 1"), nodes:
        pass


def test_attention_dp_over_two_nodes_updates_and_pauses(
    pool: ServerPool, checkpoints: Path, tmp_path: Path
) -> None:
    """Each node's rank has its own requests."""
    pool.discard()
    with serve_nodes(
        checkpoints / "v0",
        *FLAGS,
        "--attn-dp-size", "2",
        folder=tmp_path,
        env=nodes_environment("attention_dp"),
    ) as nodes:  # fmt: skip
        server = nodes.first
        running = start_running(server, 4, tokens=ENDLESS)
        receipt = update(server, checkpoints, 1, non_blocking=True, kv_cache="fence")
        assert [(r["dp_rank"], r["tp_rank"]) for r in receipt["ranks"]] == [(0, 0), (1, 1)]
        for generation in running:
            generation.wait_for_tokens(generation.count + 3)
        paused = pause(server, "retract", lease_s=0.5)
        assert sum(rank["retracted"] for rank in paused["ranks"]) == 4
        until("the lease runs out", lambda: not status(server)["paused"])
        for output in expect_all_go_on(running):
            assert versions_of(output) == ["v0", "v1"]
        expect_served(server, 1)
