"""Update calls in every order, also while other calls wait for their ranks.

The front end is real. The test decides when its ranks answer, so a call may come at any moment of
another call.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight.messages import (
    CommitCall,
    DropCall,
    OpenCall,
    RollbackCall,
    SealCall,
)
from sglang_inflight.vocabulary.answers import Answer
from sglang_inflight.vocabulary.bodies import (
    AbortUpdateBody,
    BeginBody,
    EndBody,
    RollbackBody,
    SealBody,
)
from sglang_inflight.vocabulary.errors import InflightError
from tests.support.ticks import run, tick
from tests.unit.fakes import (
    SESSION,
    Play,
)

EVENTS: dict[str, Callable[[Play], object]] = {
    "ranks answer": lambda play: play.ranks.answer(),
    "a rank refuses": Play.refuse,
    "a caller leaves": Play.leave,
    "piece": lambda play: play.make(play.updates.update(play.piece(session_id=SESSION))),
    "seal": lambda play: play.make(play.updates.seal(SealBody(session_id=SESSION))),
    "end": lambda play: play.make(play.updates.end(EndBody(non_blocking=True, session_id=SESSION))),
    "abort": lambda play: play.make(play.updates.abort(AbortUpdateBody(session_id=SESSION))),
    "lapse": Play.lapse,
    "replace": lambda play: play.make(play.updates.update(play.piece(on_busy="replace"))),
    "roll back": lambda play: play.make(play.updates.roll_back(RollbackBody())),
}


async def begin() -> Play:
    play = Play()
    begun = BeginBody(new_id=SESSION, non_blocking=True)
    beginning = asyncio.ensure_future(play.updates.begin(begun))
    await play.settle()
    play.ranks.answer()
    await beginning
    return play


async def play_through(events: tuple[str, ...]) -> None:
    play = await begin()
    for event in events:
        EVENTS[event](play)
        await play.settle()
    play.lapse()
    await play.settle()
    await play.finish()
    expect_answers(play)
    expect_each_update_ends_once(play)


def expect_answers(play: Play) -> None:
    for call in play.made:
        if call.cancelled():
            # cancelled by its own caller
            assert call in play.left
            continue
        outcome = call.exception() or call.result()
        assert outcome is None or isinstance(outcome, Answer | InflightError), outcome


def expect_each_update_ends_once(play: Play) -> None:
    assert play.two_phase.current is None
    assert not play.two_phase._turn.locked()
    # also when the callers have left
    sent = [call for call in play.ranks.called if isinstance(call, CommitCall | RollbackCall)]
    assert len(play.published) == len(sent)
    by_update: dict[str, list[Any]] = {}
    for call in play.ranks.called:
        if not isinstance(call, RollbackCall):
            by_update.setdefault(call.update_id, []).append(type(call))
    for kinds in by_update.values():
        assert kinds.count(OpenCall) == 1
        assert kinds.count(CommitCall) + kinds.count(DropCall) == 1
        assert kinds.count(SealCall) <= 1
        if CommitCall in kinds:
            assert kinds.index(SealCall) < kinds.index(CommitCall)
            assert kinds[-1] is CommitCall


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let updates work without a server's settings."""
    no_store = SimpleNamespace(hicache_storage_backend=None)
    monkeypatch.setattr("sglang_inflight.capabilities.get_memory", lambda: no_store)


def test_update_ends_once_in_every_order_of_calls(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")

    async def all_orders() -> None:
        for events in itertools.product(EVENTS, repeat=4):
            try:
                await play_through(events)
            except BaseException as error:
                error.add_note(f"in the order {events}")
                raise

    run(all_orders())


def test_repeated_end_during_commit_returns_receipt() -> None:
    """Every caller gets the outcome: a commit that was sent is carried through."""

    async def play_calls() -> None:
        play = await begin()
        EVENTS["piece"](play)
        await play.settle()
        play.ranks.answer()
        for event in ("end", "ranks answer", "a caller leaves", "end", "end", "a caller leaves"):
            await play.settle()
            EVENTS[event](play)
        await play.finish()
        _, first, second, third = play.made
        assert [first.cancelled(), third.cancelled()] == [True, True]
        assert second.result().weight_version == "v1"
        expect_answers(play)
        expect_each_update_ends_once(play)

    run(play_calls())


def test_begin_again_during_a_drop_leaves_no_session() -> None:
    """The session is begun again under its chosen id, and no rank may keep the dropped session."""

    async def play_calls(ticks: int) -> bool:
        play = Play()
        body = BeginBody(new_id=SESSION, non_blocking=True)
        play.make(play.updates.begin(body))
        await play.settle()
        play.leave()
        await tick(ticks)
        is_idle = not asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
        play.make(play.updates.begin(body))
        await play.settle()
        await play.finish()
        play.lapse()
        await play.settle()
        await play.finish()
        expect_answers(play)
        sent = [type(call) for call in play.ranks.called]
        again = play.made[1]
        # refused because of the drop, or begun again
        assert sent == ([OpenCall, DropCall] * (1 if again.exception() else 2)), again
        return is_idle

    for ticks in itertools.count():
        if run(play_calls(ticks)):
            return
