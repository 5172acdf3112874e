"""A window of ``TransparentCalls`` in which a piece is lost, while its ranks are waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglang_inflight.errors import Dropped, Refused
from sglang_inflight.frontend.bodies import ContinueBody, PauseBody
from sglang_inflight.frontend.transparent import TransparentCalls
from sglang_inflight.grants import Release
from sglang_inflight.messages import CommitCall, DropCall, OpenCall
from tests.unit.test_update_orders import SETTINGS, Play


class NoPauses:
    async def resume(self, body: ContinueBody) -> Release:
        return Release(message="Generation continued successfully.", paused=False)


class TransparentPlay(Play):
    def __init__(self) -> None:
        super().__init__()
        nothing: Any = None
        self.calls = TransparentCalls(
            self.manager,
            NoPauses(),  # type: ignore[arg-type]
            self.updates,
            nothing,
            SETTINGS,
            in_background=lambda doing: doing.close(),
        )

    def send(self) -> asyncio.Future[Any]:
        self.make(self.calls.update(self.piece()))
        return self.made[-1]

    def sent(self) -> list[type]:
        return [type(call) for call in self.ranks.called]


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none, whose settings these are."""
    for module in ("transparent", "updates.kv_policy"):
        monkeypatch.setattr(f"sglang_inflight.frontend.{module}.why_out_of_reach", lambda: None)


@pytest.mark.parametrize("others", [0, 1])
def test_a_caller_leaves_while_the_session_is_begun(others: int) -> None:
    """Its piece is missing, whoever else sends one: nothing goes live, and it is said."""

    async def play_it() -> None:
        play = TransparentPlay()
        await play.calls.pause(PauseBody(mode="in_place"))
        for _ in range(others + 1):
            play.send()
            await play.settle()
        assert play.sent() == [OpenCall]
        play.made[0].cancel()
        await play.settle()
        await play.finish()
        late = play.send()
        await play.settle()
        with pytest.raises(Dropped, match="caller has left"):
            late.result()
        continuing = asyncio.ensure_future(play.calls.resume(ContinueBody()))
        play.made.append(continuing)
        await play.settle()
        await play.finish()
        with pytest.raises(Dropped, match="caller has left"):
            continuing.result()
        assert CommitCall not in play.sent()
        assert play.sent().count(OpenCall) == play.sent().count(DropCall) == 1
        await expect_the_next_to_work(play)

    asyncio.run(play_it())


def test_a_piece_that_cannot_be_read_drops_the_session() -> None:
    async def play_it() -> None:
        play = TransparentPlay()
        await play.calls.pause(PauseBody(mode="in_place"))
        play.send()
        await play.settle()
        await play.finish()
        with pytest.raises(Refused), play.calls.piece():
            raise Refused("bad request body")
        play.make(play.calls.resume(ContinueBody()))
        await play.settle()
        await play.finish()
        with pytest.raises(Dropped, match="bad request body"):
            play.made[-1].result()
        await expect_the_next_to_work(play)

    asyncio.run(play_it())


async def expect_the_next_to_work(play: TransparentPlay) -> None:
    assert play.two_phase.current is None
    await play.calls.pause(PauseBody(mode="in_place"))
    piece = play.send()
    await play.settle()
    await play.finish()
    piece.result()
    play.make(play.calls.resume(ContinueBody()))
    await play.settle()
    await play.finish()
    assert play.made[-1].result().receipt.weight_version == "v1"
