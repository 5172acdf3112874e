"""Speculative decoding: all tokens of a step belong to the step's weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.server import Server
from tests.support.kv_runs import kv_runs, kv_without_reuse, runs
from tests.support.load import (
    ENDLESS,
    Output,
    expect_aborted,
    expect_all_go_on,
    expect_spans_in_chunks,
    expect_whole,
    pause,
    prompt,
    resume,
    settle,
    start,
    start_running,
    update,
    versions_of,
)
from tests.support.plugins import with_plugin
from tests.support.pool import FLAVOURS, Flavour, ServerPool, add_both_loops
from tests.support.stand_ins import stands_in_for_kernels

pytestmark = stands_in_for_kernels

DRAFT = 4
LOOPS = add_both_loops("speculation", Flavour(
    (
        "--speculative-algorithm", "NGRAM",
        "--speculative-num-draft-tokens", str(DRAFT),
        "--max-running-requests", "8",
        "--weight-version", "v0",
    ),
    with_plugin("speculation"),
))  # fmt: skip


@pytest.fixture(params=LOOPS)
def server(request: pytest.FixtureRequest, pool: ServerPool) -> Iterator[Server]:
    yield pool.get(FLAVOURS[request.param])
    pool.restore()


@pytest.mark.parametrize("kv", ["fence", "keep", "recompute"])
def test_spans_and_kv_versions_are_exact_across_updates_in_flight(
    server: Server, checkpoints: Path, kv: str
) -> None:
    running = start_running(server, 3, tokens=ENDLESS)
    for version in (1, 2, 3):
        for generation in running:
            generation.wait_for_tokens(generation.count + 3 * DRAFT)
        update(server, checkpoints, version, non_blocking=True, kv_cache=kv)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1", "v2", "v3"]
        assert output.meta["spec_accept_length"] > 1
        expect_spans_in_chunks(output)
        expect_kv(output, kv)


@pytest.mark.parametrize("most", [0, 1])
def test_kv_over_the_bound_is_recomputed(server: Server, checkpoints: Path, most: int) -> None:
    running = start_running(server, 3, tokens=ENDLESS)
    for version in (1, 2, 3):
        update(server, checkpoints, version, non_blocking=True, kv_max_age=most)
        for generation in running:
            generation.wait_for_tokens(generation.count + 3 * DRAFT)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1", "v2", "v3"]
        expect_spans_in_chunks(output)
        kv = [version for version, _ in kv_runs(output)]
        assert kv == (["v2", "v3"] if most else ["v3"])


def expect_kv(output: Output, kv: str) -> None:
    if kv == "recompute":
        assert kv_runs(output) == [("v3", 16 + len(output.tokens) - 1)]
    else:
        assert kv_runs(output) == kv_without_reuse(output, 16)


def test_reused_prefix_keeps_its_kv_versions(server: Server, checkpoints: Path) -> None:
    """The cache holds the KV of accepted tokens only."""
    input_ids = prompt(16)
    (first,) = start_running(server, 1, tokens=ENDLESS, input_ids=input_ids)
    update(server, checkpoints, 1, non_blocking=True, kv_cache="keep")
    first.wait_for_tokens(first.count + 3 * DRAFT)
    first.abort()
    used = expect_aborted(first)
    made = kv_without_reuse(used, 16)
    assert kv_runs(used) == made
    update(server, checkpoints, 2, non_blocking=True, kv_cache="keep")
    (second,) = start(server, 1, tokens=1, input_ids=input_ids + used.tokens)
    again = expect_whole(second)
    reused = again.meta["cached_tokens"]
    labels = [version for version, n in made for _ in range(n)][:reused]
    assert {"v0", "v1"} <= set(labels)
    assert kv_runs(again) == runs(labels + ["v2"] * (16 + len(used.tokens) - reused))


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_spans_are_exact_across_updates_while_paused(
    server: Server, checkpoints: Path, mode: str
) -> None:
    running = start_running(server, 3, tokens=ENDLESS)
    for version in (1, 2):
        pause(server, mode)
        settle(server, running)
        update(server, checkpoints, version, flush_cache=mode == "retract")
        resume(server)
        for generation in running:
            generation.wait_for_tokens(generation.count + 3 * DRAFT)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1", "v2"]


def test_draining_pauses_let_requests_end_or_abort_them(server: Server) -> None:
    ending = start_running(server, 2, tokens=100)
    pause(server, "wait")
    for generation in ending:
        expect_whole(generation)
    waiting = start(server, 2, tokens=10)
    resume(server)
    for generation in waiting:
        expect_whole(generation)
    running = start_running(server, 2, tokens=ENDLESS)
    pause(server, "abort")
    for generation in running:
        expect_aborted(generation)
    resume(server)
