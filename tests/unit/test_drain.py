"""Upstream's lock of requests and updates, where a cancellation comes at any tick."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sglang.srt.utils.aio_rwlock import RWLock

from sglang_inflight.errors import Conflict
from sglang_inflight.frontend.deadline import Deadline
from sglang_inflight.frontend.updates.drain import NoRequestsRunning

PATIENCE_S = 5.0


class Manager:
    """As much of a TokenizerManager as the lock needs."""

    def __init__(self) -> None:
        self.model_update_lock = RWLock()
        self.is_pause = False


def quiet(manager: Any) -> Any:
    return NoRequestsRunning(manager, pauses=None)._locked(Deadline(PATIENCE_S))  # type: ignore[arg-type]


async def expect_free(manager: Manager) -> None:
    """A request is let in, and the next update after it."""
    lock = manager.model_update_lock
    async with asyncio.timeout(PATIENCE_S):
        async with lock.reader_lock:
            pass
        async with quiet(manager):
            assert lock._writer_active
    assert not lock._writer_active


@pytest.mark.parametrize("ticks", range(8))
def test_a_cancelled_update_leaves_no_lock_behind(ticks: int) -> None:
    """The cancellation comes ``ticks`` ticks of the loop after the last request's end."""

    async def play() -> None:
        manager = Manager()
        await manager.model_update_lock.acquire_reader()

        async def update() -> None:
            async with quiet(manager):
                await asyncio.Event().wait()

        updating = asyncio.create_task(update())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await manager.model_update_lock.release_reader()
        for _ in range(ticks):
            await asyncio.sleep(0)
        updating.cancel()
        await asyncio.wait({updating})
        assert updating.cancelled()
        await expect_free(manager)

    asyncio.run(play())


def test_a_pause_ends_the_waiting() -> None:
    """The requests that it waits for never finish then."""

    async def play() -> None:
        manager = Manager()
        await manager.model_update_lock.acquire_reader()
        manager.is_pause = True
        async with asyncio.timeout(PATIENCE_S), quiet(manager):
            assert not manager.model_update_lock._writer_active
        await manager.model_update_lock.release_reader()
        manager.is_pause = False
        await expect_free(manager)

    asyncio.run(play())


def test_who_queued_behind_it_goes_on_when_it_is_given_up() -> None:
    """Also while a request runs that was there before."""

    async def play() -> None:
        manager = Manager()
        lock = manager.model_update_lock
        await lock.acquire_reader()

        async def update() -> None:
            async with quiet(manager):
                await asyncio.Event().wait()

        updating = asyncio.create_task(update())
        while not lock._waiting_writers:
            await asyncio.sleep(0)
        queued = asyncio.create_task(lock.acquire_reader())
        while len(lock._cond._waiters) < 2:
            await asyncio.sleep(0)
        updating.cancel()
        await asyncio.wait({updating})
        async with asyncio.timeout(PATIENCE_S):
            await queued
        assert lock._readers == 2

    asyncio.run(play())


def test_who_comes_amid_an_update_in_a_pause_is_let_in() -> None:
    """The server's queue keeps it, as it keeps all that come in a pause."""

    async def play() -> None:
        manager = Manager()
        await manager.model_update_lock.acquire_reader()
        manager.is_pause = True
        async with asyncio.timeout(PATIENCE_S), quiet(manager):
            await asyncio.sleep(0)
            await manager.model_update_lock.acquire_reader()
        assert manager.model_update_lock._readers == 2

    asyncio.run(play())


def test_the_waiting_ends_in_its_time() -> None:
    async def play() -> None:
        manager = Manager()
        await manager.model_update_lock.acquire_reader()
        block = NoRequestsRunning(manager, pauses=None)._locked(Deadline(0.01))  # type: ignore[arg-type]
        with pytest.raises(Conflict, match="requests still ran"):
            async with asyncio.timeout(PATIENCE_S), block:
                pass
        await manager.model_update_lock.release_reader()
        await expect_free(manager)

    asyncio.run(play())
