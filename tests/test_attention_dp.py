"""Attention DP: each rank has its own requests, and all ranks compute each step together.

A frozen rank makes a stepping rank wait for ever. So all ranks must end a drain, and a lease, in
the same pass of their loops. With local control broadcast each rank receives control messages on
its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import marker
from harness.server import Server
from tests.support.load import (
    ENDLESS,
    Generation,
    expect_aborted,
    expect_all_go_on,
    expect_whole,
    pause,
    resume,
    settle,
    start_running,
    status,
    until,
    update,
    versions_of,
)
from tests.support.plugins import with_plugin
from tests.support.pool import FLAVOURS, Flavour, ServerPool, add_both_loops
from tests.support.updates import succeed, tensor_body

LEASE_S = 0.1
LOOPS = add_both_loops(
    "attention_dp",
    Flavour(
        ("--tp-size", "2", "--attn-dp-size", "2", "--weight-version", "v0"),
        with_plugin("attention_dp"),
    ),
)
FLAVOURS["attention_dp_local"] = Flavour(
    (*FLAVOURS[LOOPS[0]].flags, "--enable-dp-attention-local-control-broadcast"),
    # delays a message by some steps, during which the other rank alone has it
    with_plugin("attention_dp") | {"INFLIGHT_TEST_LATE_S": "0.02"},
)


@pytest.fixture(params=[*LOOPS, "attention_dp_local"])
def server(request: pytest.FixtureRequest, pool: ServerPool) -> Iterator[Server]:
    yield pool.get(FLAVOURS[request.param])
    pool.restore()


def start_uneven(server: Server) -> tuple[Generation, Generation]:
    """Start one request on each rank, and let one end long before the other."""
    (long,) = start_running(server, 1, tokens=60)
    (short,) = start_running(server, 1, tokens=20)
    return long, short


def test_updates_reach_running_requests_on_both_ranks(server: Server, checkpoints: Path) -> None:
    running = start_running(server, 4, tokens=ENDLESS)
    update(server, checkpoints, 1, non_blocking=True, kv_cache="fence")
    for generation in running:
        generation.wait_for_tokens(generation.count + 3)
    receipt = update(server, checkpoints, 2, non_blocking=True, kv_cache="recompute")
    assert [(r["dp_rank"], r["tp_rank"]) for r in receipt["ranks"]] == [(0, 0), (1, 1)]
    for generation in running:
        generation.wait_for_tokens(generation.count + 3)
    # one payload per tensor-parallel rank; attention ranks add none
    body = tensor_body(marker.tensors(3), ranks=2, weight_version="v3", non_blocking=True)
    succeed(server.post("/update_weights_from_tensor", body))
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1", "v2", "v3"]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_freezes_both_ranks(server: Server, mode: str) -> None:
    running = start_running(server, 3, tokens=ENDLESS)
    paused = pause(server, mode)
    assert sum(rank["running"] + rank["waiting"] for rank in paused["ranks"]) == 3
    settle(server, running)
    resume(server)
    expect_all_go_on(running)


def test_drain_ends_on_all_ranks_in_the_same_pass(server: Server) -> None:
    for _ in range(3):
        generations = start_uneven(server)
        paused = pause(server, "wait")
        assert [rank["running"] for rank in paused["ranks"]] == [0, 0]
        for generation in generations:
            expect_whole(generation)
        resume(server)


def test_pause_aborts_requests_of_both_ranks(server: Server) -> None:
    running = start_running(server, 3, tokens=ENDLESS)
    paused = pause(server, "abort")
    assert sum(rank["aborted"] for rank in paused["ranks"]) == 3
    for generation in running:
        expect_aborted(generation)
    resume(server)


def test_lease_and_wait_timeout_end_on_all_ranks_in_the_same_pass(server: Server) -> None:
    running = start_running(server, 3, tokens=ENDLESS)
    for _ in range(3):
        pause(server, "in_place", lease_s=LEASE_S)
        until("the lease runs out", lambda: not status(server)["paused"])
        pause(server, "wait", timeout_s=LEASE_S)
        settle(server, running)
        resume(server)
    expect_all_go_on(running)


def test_each_rank_recomputes_what_is_too_old(server: Server, checkpoints: Path) -> None:
    """The ranks have requests of different ages, so one retracts some while the other steps."""
    old = start_running(server, 1, tokens=ENDLESS)
    update(server, checkpoints, 1, non_blocking=True, kv_cache="keep")
    young = start_running(server, 2, tokens=ENDLESS)
    update(server, checkpoints, 2, non_blocking=True, kv_max_age=1)
    for generation in (*old, *young):
        generation.wait_for_tokens(generation.count + 3)
    for output in expect_all_go_on([*old, *young]):
        is_old = "v0" in versions_of(output)
        assert output.meta["num_retractions"] == int(is_old)
        kv = [span["version"] for span in output.meta["kv_versions"]]
        assert kv == (["v2"] if is_old else ["v1", "v2"])
