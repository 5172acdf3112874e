"""Something that is done once, for as long as anybody wants it."""

from __future__ import annotations

import asyncio

import pytest

from sglang_inflight.frontend.shared_call import SharedCall


class Work:
    def __init__(self) -> None:
        self.starts = 0
        self.was_cancelled = False
        self.may_end = asyncio.Event()

    async def do(self) -> int:
        self.starts += 1
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return self.starts


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_all_hear_the_one_outcome() -> None:
    async def play() -> None:
        shared, work = SharedCall[int](), Work()
        callers = [asyncio.create_task(shared.join(work.do)) for _ in range(3)]
        await settle()
        work.may_end.set()
        assert await asyncio.gather(*callers) == [1, 1, 1]
        assert await shared.join(work.do) == 1

    asyncio.run(play())


def test_who_leaves_takes_it_from_nobody() -> None:
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


def test_it_ends_with_the_last_who_wants_it() -> None:
    async def play() -> None:
        shared, work = SharedCall[int](), Work()
        callers = [asyncio.create_task(shared.join(work.do)) for _ in range(2)]
        await settle()
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
        assert work.was_cancelled
        assert not shared.is_awaited

    asyncio.run(play())


def test_a_failure_is_everybodys() -> None:
    async def fail() -> int:
        raise ValueError("no")

    async def play() -> None:
        shared = SharedCall[int]()
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                await shared.join(fail)

    asyncio.run(play())
