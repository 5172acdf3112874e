"""Streaming sessions (``--enable-streaming-session``) keep their KV between turns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.server import Server, serve
from harness.starting import STEP_MS
from tests.support.load import (
    Generation,
    Output,
    ask,
    expect_whole,
    labels_of,
    pass_boundaries,
    pause,
    prompt,
    resume,
    start,
    until,
    until_waiting,
    update,
)

LENGTH, MORE, TOKENS = 40, 10, 4
# tokens of a turn that lasts for seconds, as its steps wait so many milliseconds
LONG, LONG_STEP_MS = 60, 30
# positions with KV; nothing computes the KV of the last token
FIRST_TURN = LENGTH + TOKENS - 1
BOTH_TURNS = LENGTH + TOKENS + MORE + TOKENS - 1

_serial = itertools.count()


@pytest.fixture(scope="module", params=["overlap", "normal"])
def server(
    request: pytest.FixtureRequest, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("sessions") / "log"
    loop = ("--disable-overlap-schedule",) if request.param == "normal" else ()
    flags = ("--enable-streaming-session", "--weight-version", "v0", *loop)
    env = {STEP_MS: str(LONG_STEP_MS)}
    with serve(checkpoints / "v0", *flags, log=log, env=env) as server:
        yield server


class Session:
    def __init__(self, server: Server, **fields: Any) -> None:
        self._server = server
        self.name = f"session-{next(_serial)}"
        body = {"capacity_of_str_len": 10000, "session_id": self.name, "streaming": True}
        assert ask(server, "POST", "/open_session", body | fields) == self.name

    def begin(self, length: int = MORE, tokens: int = TOKENS) -> Generation:
        return Generation(
            self._server, tokens=tokens, input_ids=prompt(length), session_params={"id": self.name}
        )

    def turn(self, length: int = MORE) -> Output:
        return expect_whole(self.begin(length))

    def close(self) -> None:
        ask(self._server, "POST", "/close_session", {"session_id": self.name})


def commit(server: Server, checkpoints: Path, kv_cache: str) -> tuple[str, str]:
    """Commit the next version, and return the versions before and after."""
    before = serving(server)
    version = (int(before[1:]) + 1) % 6
    update(server, checkpoints, version, non_blocking=True, kv_cache=kv_cache)
    return before, f"v{version}"


def serving(server: Server) -> str:
    version: str = ask(server, "GET", "/get_weight_version")["weight_version"]
    return version


def kv_of(output: Output) -> list[str]:
    return labels_of(output.meta["kv_versions"])


def expect_well(server: Server) -> None:
    """Check that the scheduler survives being idle: it exits if KV slots are unaccounted for."""
    pass_boundaries(server)
    (generation,) = start(server, 1, tokens=TOKENS)
    expect_whole(generation)


def test_closed_session_frees_its_kv(server: Server) -> None:
    session = Session(server)
    assert kv_of(session.turn(LENGTH)) == [serving(server)] * FIRST_TURN
    second = session.turn()
    assert second.meta["cached_tokens"] == FIRST_TURN
    assert kv_of(second) == [serving(server)] * BOTH_TURNS
    session.close()
    expect_well(server)


def test_timed_out_session_frees_its_kv(server: Server) -> None:
    # on busy cores the turn may come this much later than the session
    session = Session(server, timeout=1.0)
    session.turn(LENGTH)
    until("it is closed", lambda: f"Session closed: {session.name}" in server.log_text())
    expect_well(server)


@pytest.mark.parametrize("kv_cache", ["fence", "keep", "recompute"])
def test_commit_between_two_turns_follows_the_kv_policy(
    server: Server, checkpoints: Path, kv_cache: str
) -> None:
    session = Session(server)
    session.turn(LENGTH)
    old, new = commit(server, checkpoints, kv_cache)
    second = session.turn()
    if kv_cache == "keep":
        assert kv_of(second) == [old] * FIRST_TURN + [new] * (BOTH_TURNS - FIRST_TURN)
    else:
        assert second.meta["cached_tokens"] == 0
        assert kv_of(second) == [new] * BOTH_TURNS
    # the next turn reuses the new KV
    assert session.turn().meta["cached_tokens"] == BOTH_TURNS
    session.close()
    expect_well(server)


def test_fence_during_a_turn_keeps_its_kv_from_the_next_turn(
    server: Server, checkpoints: Path
) -> None:
    session = Session(server)
    session.turn(LENGTH)
    running = session.begin(tokens=LONG)
    running.wait_for_tokens(3)
    old, new = commit(server, checkpoints, "fence")
    first = kv_of(expect_whole(running))
    assert set(first[:FIRST_TURN]) == {old}
    assert first[-1] == new
    later = session.turn()
    assert later.meta["cached_tokens"] == 0
    assert set(kv_of(later)) == {new}
    session.close()
    expect_well(server)


def test_fence_before_a_waiting_turn_recomputes_its_history(
    server: Server, checkpoints: Path
) -> None:
    session = Session(server)
    session.turn(LENGTH)
    pause(server, "in_place")
    waiting = session.begin()
    until_waiting(server, 1)
    _, new = commit(server, checkpoints, "fence")
    resume(server)
    assert kv_of(expect_whole(waiting)) == [new] * BOTH_TURNS
    session.close()
    expect_well(server)


def test_fence_during_a_retracted_turn_recomputes_its_kv(server: Server, checkpoints: Path) -> None:
    """The session keeps the turn's KV until the fence."""
    session = Session(server)
    session.turn(LENGTH)
    running = session.begin(tokens=LONG)
    running.wait_for_tokens(3)
    pause(server, "retract")
    _, new = commit(server, checkpoints, "fence")
    resume(server)
    assert set(kv_of(expect_whole(running))) == {new}
    session.close()
    expect_well(server)


def test_history_is_recomputed_when_its_oldest_part_is_over_the_bound(
    server: Server, checkpoints: Path
) -> None:
    """A turn adds young KV to the session, which stays as old as its oldest part."""
    session = Session(server)
    session.turn(LENGTH)
    history, begun_by = FIRST_TURN + 1, serving(server)
    for age in (1, 2, 3):
        update(server, checkpoints, age + 2, non_blocking=True, kv_max_age=2)
        output = session.turn()
        if age < 3:
            assert output.meta["cached_tokens"] == history - 1
            assert kv_of(output)[0] == begun_by
        else:
            assert output.meta["cached_tokens"] == 0
            assert set(kv_of(output)) == {"v5"}
        history += MORE + TOKENS
    session.close()
    expect_well(server)


def test_turn_frees_a_history_that_is_over_its_own_bound(server: Server, checkpoints: Path) -> None:
    session = Session(server)
    session.turn(LENGTH)
    commit(server, checkpoints, "keep")
    (turn,) = start(
        server, 1, tokens=TOKENS, input_ids=prompt(MORE), session_params={"id": session.name},
        sampling={"custom_params": {"kv_max_age": 0}},
    )  # fmt: skip
    output = expect_whole(turn)
    assert output.meta["cached_tokens"] == 0
    assert set(kv_of(output)) == {serving(server)}
    session.close()
    expect_well(server)


def test_running_turn_over_the_bound_recomputes_its_history(
    server: Server, checkpoints: Path
) -> None:
    session = Session(server)
    session.turn(LENGTH)
    running = session.begin(tokens=LONG)
    running.wait_for_tokens(3)
    receipt = update(server, checkpoints, 0, non_blocking=True, kv_max_age=0)
    assert receipt["retracted"] == 1
    output = expect_whole(running)
    assert len(output.tokens) == LONG
    assert set(kv_of(output)) == {"v0"}
    assert session.turn().meta["cached_tokens"] == FIRST_TURN + 1 + MORE + LONG - 1
    session.close()
    expect_well(server)
