"""Answers when a rank of another node falls silent, to our calls and SGLang's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import FlushCacheReqInput, FlushCacheReqOutput
from sglang.srt.runtime_context import get_parallel

from sglang_inflight.extensions.memory.messages import CancelReleaseCall
from sglang_inflight.frontend.aio import Lifetime
from sglang_inflight.frontend.control_calls import ControlCalls
from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.messages import Done, RankIsSilent, StatusCall
from sglang_inflight.vocabulary.errors import OutcomeUnknown, RankSilent

PATIENCE_S = 60.0
SECOND = "rank dp0 pp0 tp1"
SILENT, HEARD = (RankIsSilent(tp_rank=1, for_s=for_s) for for_s in (15.0, None))


class FrontEnd:
    """A front end for two ranks. The test gives their answers."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        manager: Any = SimpleNamespace(
            auto_create_handle_loop=lambda: None, _async_dispatch_to_scheduler=self.sent.put
        )
        lifetime = Lifetime(manager)
        self.ranks = Ranks(manager, lifetime)
        self.control_calls = ControlCalls(self.ranks, lifetime)
        communicator: Any = FanOutCommunicator(self.sent.put_nowait, 1)
        communicator.inflight = self.control_calls
        self.communicator = communicator

    async def flush(self) -> list[Any]:
        """SGLang's own flush."""
        return await ControlCalls.call(self.communicator, FlushCacheReqInput())


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with get_parallel().override(
        pp_size=1, tp_size=2, dp_size=1, attn_dp_enabled=False, attn_dp_size=1
    ):
        yield


Call = Callable[[FrontEnd], Awaitable[Any]]
CALLS: dict[str, tuple[Call, type[Exception]]] = {
    "ours": (lambda end: end.ranks.call(StatusCall(), PATIENCE_S), RankSilent),
    "ours, which cannot be called back": (
        lambda end: end.ranks.carry_out(CancelReleaseCall(), PATIENCE_S),
        OutcomeUnknown,
    ),
    "SGLang's": (FrontEnd.flush, OutcomeUnknown),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("when", ["while it waits", "before it comes"])
def test_call_to_a_silent_rank_is_answered(call: str, when: str) -> None:
    make, error = CALLS[call]

    async def play() -> None:
        end = FrontEnd()
        if when == "before it comes":
            end.ranks.take_silence(SILENT)
        calling = asyncio.ensure_future(make(end))
        # a rank carries the call out when it is heard again
        await end.sent.get()
        if when == "while it waits":
            end.ranks.take_silence(SILENT)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(error, match=SECOND):
                await calling
        # nothing of the call is left
        assert (end.ranks._collectors, end.ranks._awaited) == ({}, [])
        assert not end.communicator._queueing_lock.locked()

    asyncio.run(play())


@pytest.mark.parametrize("when", ["it had answered", "it is heard of again"])
def test_answered_or_returned_rank_is_not_silent(when: str) -> None:
    async def play() -> None:
        end = FrontEnd()
        if when == "it is heard of again":
            end.ranks.take_silence(SILENT)
            end.ranks.take_silence(HEARD)
        calling = asyncio.ensure_future(end.flush())
        rid = (await end.sent.get()).rid
        end.control_calls.take_rank_answer(Done(call_id=rid, tp_rank=1))
        if when == "it had answered":
            end.ranks.take_silence(SILENT)
        answer = FlushCacheReqOutput(rid=rid, success=True)
        end.control_calls.take_answer(answer)
        assert await calling == [answer]

    asyncio.run(play())
