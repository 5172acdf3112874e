"""A pause call repeated under its chosen name, at any moment of the first call."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight.answers import Grant
from sglang_inflight.frontend.bodies import PauseBody
from sglang_inflight.frontend.pauses import Pauses
from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.messages import (
    A,
    ContinueCall,
    Failed,
    InflightCall,
    PauseCall,
    Paused,
    Resumed,
    StatusCall,
)
from tests.support.ticks import run, tick, until_idle

BODY = PauseBody(mode="in_place", new_id="p")
# more ticks than a call waits for by itself
MOST_TICKS = 100


class OneRank(Ranks):
    """A rank in a long step. ``step`` ends it and carries the calls out."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.takes = 0
        self._told: list[tuple[Any, asyncio.Future[Any]]] = []

    async def ask(self, call: InflightCall[A], timeout_s: float) -> list[A | Failed]:
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._told.append((call, answered))
        return [await answered]

    def step(self) -> None:
        told, self._told = self._told, []
        for call, answered in told:
            answer = self._do(call)
            if not answered.done():
                answered.set_result(answer)

    def _do(self, call: Any) -> Any:
        match call:
            case PauseCall(pause_id=pause_id):
                self.takes += 1
                self.held = [pause_id]
                return Paused(mode=call.mode, running=0, waiting=0, retracted=0, aborted=0)
            case ContinueCall():
                self.held = []
                return Resumed(paused=False)
            case StatusCall():
                return SimpleNamespace(pause=SimpleNamespace(paused=bool(self.held)))
        raise AssertionError(call)


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pauses work without a server's settings."""
    for module in ("pauses", "sglangs_pause"):
        monkeypatch.setattr(f"sglang_inflight.frontend.{module}.why_no_pause", lambda: None)


def pauses_of(rank: OneRank) -> Pauses:
    manager: Any = SimpleNamespace(
        gracefully_exit=False, is_pause=False, config_value=lambda name: "v0"
    )
    metric = SimpleNamespace(observe=lambda value: None)
    metrics: Any = SimpleNamespace(pause_grant=SimpleNamespace(labels=lambda mode: metric))
    return Pauses(manager, rank, metrics)


async def finish(rank: OneRank, calls: list[asyncio.Task[Grant]]) -> None:
    while not all(call.done() for call in calls):
        rank.step()
        await until_idle()


def test_repeated_pause_is_granted_during_release_of_first() -> None:
    """At each tick after the first caller left, a second and a third call are made."""

    async def play(ticks: int) -> bool:
        rank = OneRank()
        pauses = pauses_of(rank)
        first = asyncio.create_task(pauses.pause(BODY))
        await until_idle()
        first.cancel()
        await tick(ticks)
        is_idle = not asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
        again = [asyncio.create_task(pauses.pause(BODY)) for _ in range(2)]
        await finish(rank, [first, *again])
        assert first.cancelled()
        assert {call.result().pause_id for call in again} == {"p"}
        # two takes: the first caller's, since released, and one for both repeats
        assert (rank.held, rank.takes) == (["p"], 2)
        assert pauses._taking == {}
        return is_idle

    assert any(run(play(ticks)) for ticks in range(MOST_TICKS))


def test_pause_without_callers_is_released() -> None:
    async def play() -> None:
        rank = OneRank()
        pauses = pauses_of(rank)
        calls = []
        for _ in range(3):
            calls.append(asyncio.create_task(pauses.pause(BODY)))
            await until_idle()
            calls[-1].cancel()
            await until_idle()
        await finish(rank, calls)
        assert all(call.cancelled() for call in calls)
        assert (rank.held, pauses._taking) == ([], {})

    run(play())
