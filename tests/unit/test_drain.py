"""SGLang's lock between requests and updates, cancelled at any tick."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sglang.srt.utils.aio_rwlock import RWLock

from sglang_inflight.errors import Conflict
from sglang_inflight.frontend.aio import Deadline
from sglang_inflight.frontend.updates.drain import NoRequestsRunning

PATIENCE_S = 5.0


class Manager:
    """The parts of a TokenizerManager used by the lock."""

    def __init__(self) -> None:
        self.model_update_lock = RWLock()
        self.is_pause = False


def no_requests_running(manager: Any) -> Any:
    return NoRequestsRunning(manager, pauses=None)._locked(Deadline(PATIENCE_S))  # type: ignore[arg-type]


async def expect_lock_free(manager: Manager) -> None:
    """Let a request in, and then an update."""
    lock = manager.model_update_lock
    async with asyncio.timeout(PATIENCE_S):
        async with lock.reader_lock:
            pass
        async with no_requests_running(manager):
            assert lock._writer_active
    assert not lock._writer_active


@pytest.mark.parametrize("ticks", range(8))
def test_cancelled_update_leaves_no_lock_held(ticks: int) -> None:
    """Cancel ``ticks`` ticks of the loop after the last request's end."""

    async def play() -> None:
        manager = Manager()
        await manager.model_update_lock.acquire_reader()

        async def update() -> None:
            async with no_requests_running(manager):
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
        await expect_lock_free(manager)

    asyncio.run(play())


def test_pause_ends_wait_for_requests() -> None:
    """Requests running at the pause would never finish."""

    async def play() -> None:
        manager = Manager()
        await manager.model_update_lock.acquire_reader()
        manager.is_pause = True
        async with asyncio.timeout(PATIENCE_S), no_requests_running(manager):
            assert not manager.model_update_lock._writer_active
        await manager.model_update_lock.release_reader()
        manager.is_pause = False
        await expect_lock_free(manager)

    asyncio.run(play())


def test_queued_request_goes_on_after_update_is_cancelled() -> None:
    """An earlier request still runs."""

    async def play() -> None:
        manager = Manager()
        lock = manager.model_update_lock
        await lock.acquire_reader()

        async def update() -> None:
            async with no_requests_running(manager):
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


def test_request_during_paused_update_is_let_in() -> None:
    """The server queues the request, like any request during a pause."""

    async def play() -> None:
        manager = Manager()
        await manager.model_update_lock.acquire_reader()
        manager.is_pause = True
        async with asyncio.timeout(PATIENCE_S), no_requests_running(manager):
            await asyncio.sleep(0)
            await manager.model_update_lock.acquire_reader()
        assert manager.model_update_lock._readers == 2

    asyncio.run(play())


def test_wait_for_requests_times_out() -> None:
    async def play() -> None:
        manager = Manager()
        await manager.model_update_lock.acquire_reader()
        block = NoRequestsRunning(manager, pauses=None)._locked(Deadline(0.01))  # type: ignore[arg-type]
        with pytest.raises(Conflict, match="requests still ran"):
            async with asyncio.timeout(PATIENCE_S), block:
                pass
        await manager.model_update_lock.release_reader()
        await expect_lock_free(manager)

    asyncio.run(play())
