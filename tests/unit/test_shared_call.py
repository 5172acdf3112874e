"""A shared call: run once, for as long as any caller waits."""

from __future__ import annotations

import asyncio

import pytest

from sglang_inflight.frontend.aio import SharedCall


class Work:
    def __init__(self) -> None:
        self.starts = 0
        self.was_cancelled = False
        self.may_end = asyncio.Event()
        # clean-up after a cancel
        self.may_clean_up = asyncio.Event()
        self.may_clean_up.set()

    async def do(self) -> int:
        self.starts += 1
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            await self.may_clean_up.wait()
            raise
        return self.starts


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_shared_call_gives_all_callers_one_result() -> None:
    async def play() -> None:
        shared, work = SharedCall[int](), Work()
        callers = [asyncio.create_task(shared.join(work.do)) for _ in range(3)]
        await settle()
        work.may_end.set()
        assert await asyncio.gather(*callers) == [1, 1, 1]
        assert await shared.join(work.do) == 1

    asyncio.run(play())


def test_cancelled_caller_keeps_shared_call_running() -> None:
    async def play() -> None:
        shared, work = SharedCall[int](), Work()
        first = asyncio.create_task(shared.join(work.do))
        second = asyncio.create_task(shared.join(work.do))
        await settle()
        first.cancel()
        await settle()
        assert first.cancelled()
        assert not work.was_cancelled
        work.may_end.set()
        assert await second == 1

    asyncio.run(play())


def test_shared_call_ends_with_its_last_caller() -> None:
    async def play() -> None:
        shared, work = SharedCall[int](), Work()
        callers = [asyncio.create_task(shared.join(work.do)) for _ in range(2)]
        await settle()
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
        assert work.was_cancelled
        assert shared.is_over

    asyncio.run(play())


def test_join_during_clean_up_starts_again() -> None:
    async def play() -> None:
        shared, work = SharedCall[int](), Work()
        work.may_clean_up.clear()
        first = asyncio.create_task(shared.join(work.do))
        await settle()
        first.cancel()
        await settle()
        later = [asyncio.create_task(shared.join(work.do)) for _ in range(2)]
        await settle()
        # one run at a time, and each waiting caller gets a result
        assert (work.starts, shared.is_over) == (1, False)
        work.may_clean_up.set()
        work.may_end.set()
        assert await asyncio.gather(*later) == [2, 2]
        assert first.cancelled()
        assert shared.is_over

    asyncio.run(play())


def test_cancel_during_clean_up_starts_no_second_run() -> None:
    async def play() -> None:
        shared, work = SharedCall[int](), Work()
        work.may_clean_up.clear()
        first, second = (asyncio.create_task(shared.join(work.do)) for _ in range(2))
        await settle()
        first.cancel()
        second.cancel()
        await settle()
        # both wait for the clean-up, and one is cancelled
        second.cancel()
        third = asyncio.create_task(shared.join(work.do))
        await settle()
        third.cancel()
        await asyncio.wait({third})
        assert (work.starts, shared.is_over) == (1, False)
        work.may_clean_up.set()
        await asyncio.wait({first, second})
        assert (work.starts, shared.is_over) == (1, True)

    asyncio.run(play())


def test_shared_call_raises_for_every_caller() -> None:
    async def fail() -> int:
        raise ValueError("no")

    async def play() -> None:
        shared = SharedCall[int]()
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                await shared.join(fail)

    asyncio.run(play())
