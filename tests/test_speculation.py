"""Speculative decoding: a step brings several tokens, and all of them are of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.load import (
    ENDLESS,
    expect_aborted,
    expect_all_go_on,
    expect_spans_in_chunks,
    expect_whole,
    pause,
    resume,
    settle,
    start,
    start_running,
    update,
    versions_of,
)
from tests.support.plugins import with_plugin
from tests.support.pool import FLAVOURS, Flavour, ServerPool, add_both_loops
from tests.support.server import Server

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
def test_updates_in_flight(server: Server, checkpoints: Path, kv: str) -> None:
    running = start_running(server, 3, tokens=ENDLESS)
    for version in (1, 2, 3):
        for generation in running:
            generation.wait_for_tokens(generation.count + 3 * DRAFT)
        update(server, checkpoints, version, non_blocking=True, kv_cache=kv)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1", "v2", "v3"]
        assert output.meta["spec_accept_length"] > 1
        expect_spans_in_chunks(output)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_updates_while_paused(server: Server, checkpoints: Path, mode: str) -> None:
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


def test_draining(server: Server) -> None:
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
