"""Turns of a streaming session that are retracted or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.server import Server
from tests.support.load import (
    Generation,
    expect_whole,
    pause,
    resume,
    until,
    until_waiting,
)
from tests.test_streaming_sessions import (
    LENGTH,
    LONG,
    MORE,
    Session,
    commit,
    expect_well,
    kv_of,
)
from tests.test_streaming_sessions import server as server


def expect_refused(generation: Generation) -> None:
    generation.wait_for_end()
    reason = generation.output_so_far().meta["finish_reason"]
    assert reason["message"] == "Streaming session already has an active request."


@pytest.mark.parametrize("kv_cache", ["fence", "keep", "recompute"])
@pytest.mark.parametrize("has_history", [False, True], ids=["first", "later"])
def test_turn_sent_while_another_is_retracted_is_refused(
    server: Server, checkpoints: Path, kv_cache: str, has_history: bool
) -> None:
    session = Session(server)
    history = len(session.turn(LENGTH).tokens) + LENGTH if has_history else 0
    waiting = session.begin(tokens=LONG)
    waiting.wait_for_tokens(3)
    pause(server, "retract")
    early = session.begin()
    until_waiting(server, 2)
    _, new = commit(server, checkpoints, kv_cache)
    resume(server)
    whole = expect_whole(waiting)
    assert whole.meta["prompt_tokens"] == history + MORE
    if kv_cache != "keep":
        assert set(kv_of(whole)) == {new}
    expect_refused(early)
    assert session.turn().meta["prompt_tokens"] == history + MORE + LONG + MORE
    session.close()
    expect_well(server)


def test_refused_turn_leaves_the_session_to_the_running_one(server: Server) -> None:
    """Both come before the session has KV, and are scheduled together."""
    session = Session(server)
    pause(server, "in_place")
    first = session.begin(LENGTH, tokens=LONG)
    until_waiting(server, 1)
    early = session.begin(LENGTH)
    until_waiting(server, 2)
    resume(server)
    expect_refused(early)
    expect_refused(session.begin())
    expect_whole(first)
    assert session.turn().meta["cached_tokens"] == LENGTH + LONG - 1
    session.close()
    expect_well(server)


@pytest.mark.parametrize("has_history", [False, True], ids=["first", "later"])
def test_aborted_retracted_turn_leaves_nothing_to_the_next(
    server: Server, has_history: bool
) -> None:
    session = Session(server)
    history = len(session.turn(LENGTH).tokens) + LENGTH if has_history else 0
    waiting = session.begin(tokens=LONG)
    waiting.wait_for_tokens(3)
    pause(server, "retract")
    waiting.abort()
    waiting.wait_for_end()
    resume(server)
    assert waiting.output_so_far().finish_reason == "abort"
    following = session.turn()
    assert following.meta["prompt_tokens"] == history + MORE
    # a finished first turn leaves its prompt in the prefix cache
    assert following.meta["cached_tokens"] == (LENGTH if has_history else 0)
    session.close()
    expect_well(server)


def test_session_closed_while_its_turn_is_retracted_ends_the_turn(server: Server) -> None:
    session = Session(server)
    session.turn(LENGTH)
    waiting = session.begin(tokens=LONG)
    waiting.wait_for_tokens(3)
    pause(server, "retract")
    session.close()
    resume(server)
    expect_whole(waiting)
    until("it is closed", lambda: f"Session closed: {session.name}" in server.log_text())
    expect_well(server)
