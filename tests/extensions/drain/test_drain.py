"""A server that drains takes no new requests, and hands back those that run at the deadline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.server import Server
from tests.support.load import (
    ENDLESS,
    ask,
    expect_aborted,
    pass_boundaries,
    pause,
    start,
    start_running,
    status,
    until,
    update,
)
from tests.support.pool import MAX_RUNNING
from tests.test_bad_requests import generate

pytest_plugins = ["tests.support.fixtures"]

DRAIN = "/inflight/drain"


@pytest.fixture(params=["server", "normal_loop_server", "workers_server"])
def leaving(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of each loop, and one with tokenizer workers."""
    server: Server = request.getfixturevalue(request.param)
    yield server
    ask(server, "POST", DRAIN, {"cancel": True})


def drain(server: Server, **fields: Any) -> Any:
    return ask(server, "POST", DRAIN, fields)


def expect_closed(server: Server) -> None:
    # more requests than tokenizer workers
    for _ in range(6):
        refused = server.post(*generate())
        assert refused["status_code"] == 503, refused
        assert "the server drains (spot)" in str(refused)
    ready = server.get("/ready")
    assert ready["status_code"] == 503
    assert status(server)["draining"] == "the server drains (spot)"


def test_requests_run_to_their_end_before_the_deadline(leaving: Server) -> None:
    generations = start_running(leaving, 2, tokens=150)
    answer = drain(leaving, deadline_s=600, reason="spot")
    assert answer["draining"]
    assert answer["requests"] == 2
    expect_closed(leaving)
    for generation in generations:
        assert len(generation.output().tokens) == 150
    assert drain(leaving, cancel=True)["draining"] is False
    (generation,) = start(leaving, 1, tokens=5)
    assert len(generation.output().tokens) == 5
    assert status(leaving)["draining"] is None


@pytest.mark.parametrize("stream", [True, False])
def test_deadline_hands_requests_back_with_their_tokens(leaving: Server, stream: bool) -> None:
    running = start_running(leaving, MAX_RUNNING, tokens=ENDLESS, stream=True)
    others = start(leaving, 3, tokens=ENDLESS, stream=stream)
    drain(leaving, deadline_s=0, reason="spot")
    for generation in running:
        output = expect_aborted(generation)
        assert len(output.tokens) == output.meta["completion_tokens"] > 0
    for generation in others:
        expect_aborted(generation)
    until("nothing is left", lambda: status(leaving)["running"] + status(leaving)["waiting"] == 0)
    expect_closed(leaving)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_paused_requests_are_handed_back(leaving: Server, mode: str) -> None:
    generations = start_running(leaving, 2, tokens=ENDLESS)
    pause(leaving, mode)
    drain(leaving, deadline_s=0, reason="spot")
    for generation in generations:
        assert expect_aborted(generation).tokens


def test_another_deadline_replaces_the_first(leaving: Server) -> None:
    generations = start_running(leaving, 2, tokens=ENDLESS)
    drain(leaving, deadline_s=600, reason="spot")
    pass_boundaries(leaving)
    assert status(leaving)["running"] == 2
    drain(leaving, deadline_s=0, reason="spot")
    for generation in generations:
        expect_aborted(generation)


def test_draining_server_takes_updates(leaving: Server, checkpoints: Path) -> None:
    """A trainer that does not know of the drain is not held up."""
    drain(leaving, deadline_s=600, reason="spot")
    update(leaving, checkpoints, 1, non_blocking=True)
    assert status(leaving)["weight_version"] == "v1"
    expect_closed(leaving)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"deadline_s": -1}, "deadline_s"),
        ({"deadline_s": "soon"}, "deadline_s"),
        ({"reason": "a\nb"}, "not printable"),
        ({"deadlines": 3}, "deadlines"),
    ],
)
def test_wrong_drain_is_refused(leaving: Server, body: dict[str, Any], words: str) -> None:
    refused = leaving.post(DRAIN, body)
    assert refused["status_code"] == 400
    assert words in str(refused)
    assert status(leaving)["draining"] is None
