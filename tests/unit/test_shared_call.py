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
        # what it does when it is cancelled
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
        assert shared.is_over

    asyncio.run(play())


def test_who_comes_while_it_is_cleaned_up_starts_it_anew() -> None:
    async def play() -> None:
        shared, work = SharedCall[int](), Work()
        work.may_clean_up.clear()
        first = asyncio.create_task(shared.join(work.do))
        await settle()
        first.cancel()
        await settle()
        later = [asyncio.create_task(shared.join(work.do)) for _ in range(2)]
        await settle()
        # one at a time, and nobody who waits is forgotten
        assert (work.starts, shared.is_over) == (1, False)
        work.may_clean_up.set()
        work.may_end.set()
        assert await asyncio.gather(*later) == [2, 2]
        assert first.cancelled()
        assert shared.is_over

    asyncio.run(play())


def test_who_leaves_while_it_is_cleaned_up_lets_nobody_in() -> None:
    async def play() -> None:
        shared, work = SharedCall[int](), Work()
        work.may_clean_up.clear()
        first, second = (asyncio.create_task(shared.join(work.do)) for _ in range(2))
        await settle()
        first.cancel()
        second.cancel()
        await settle()
        # both wait for its clean-up, one of them has had enough
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


def test_a_failure_is_everybodys() -> None:
    async def fail() -> int:
        raise ValueError("no")

    async def play() -> None:
        shared = SharedCall[int]()
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                await shared.join(fail)

    asyncio.run(play())
