"""A pause call repeated under its chosen name, at any moment of the first call."""

from __future__ import annotations

import asyncio

from sglang_inflight.vocabulary.answers import Grant
from sglang_inflight.vocabulary.bodies import PauseBody
from tests.support.ticks import run, tick, until_idle
from tests.unit.fakes import PausingRank, pauses_of

BODY = PauseBody(mode="in_place", new_id="p")
# more ticks than a call waits for by itself
MOST_TICKS = 100


async def finish(rank: PausingRank, calls: list[asyncio.Task[Grant]]) -> None:
    while not all(call.done() for call in calls):
        rank.step()
        await until_idle()


def test_repeated_pause_is_granted_during_release_of_first() -> None:
    """At each tick after the first caller left, a second and a third call are made."""

    async def play(ticks: int) -> bool:
        rank = PausingRank()
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
        rank = PausingRank()
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
