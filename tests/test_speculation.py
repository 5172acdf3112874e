"""Speculative decoding: a step brings several tokens, and all of them are of its weights."""

from __future__ import annotations

import os
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
from tests.support.pool import ENV
from tests.support.server import Server, serve

PLUGIN = Path(__file__).parent / "speculation"
DRAFT = 4


@pytest.fixture(scope="module", params=["overlap", "normal"])
def speculating(
    request: pytest.FixtureRequest, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(DRAFT)]
    flags += ["--max-running-requests", "8", "--weight-version", "v0"]
    if request.param == "normal":
        flags.append("--disable-overlap-schedule")
    path = os.pathsep.join(filter(None, [str(PLUGIN), os.environ.get("PYTHONPATH")]))
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serve(checkpoints / "v0", *flags, log=log, env=ENV | {"PYTHONPATH": path}) as server:
        yield server


@pytest.fixture
def server(speculating: Server, checkpoints: Path) -> Server:
    update(speculating, checkpoints, 0)
    return speculating


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
