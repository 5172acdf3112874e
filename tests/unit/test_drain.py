"""SGLang's lock between requests and updates, cancelled at any tick."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sglang.srt.utils.aio_rwlock import RWLock

from sglang_inflight.frontend.aio import Deadline
from sglang_inflight.frontend.updates.drain import NoRequestsRunning
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.errors import Conflict
from tests.support.ticks import run, tick, until_idle

PATIENCE_S = 5.0


class Manager:
    """The parts of a TokenizerManager used by the lock."""

    def __init__(self) -> None:
        self.model_update_lock = RWLock()
        self.is_pause = False


def no_requests_running(manager: Any) -> Any:
    return NoRequestsRunning(manager, None, Capabilities())._locked(Deadline(PATIENCE_S))  # type: ignore[arg-type]


async def begin_request(manager: Manager) -> asyncio.Task[None]:
    """Start a request, and return its wait for the lock."""
    entering = asyncio.create_task(manager.model_update_lock.acquire_reader())
    await until_idle()
    return entering


async def hold(manager: Manager) -> None:
    """Hold requests back until cancelled."""
    async with no_requests_running(manager):
        await asyncio.Event().wait()


async def expect_lock_free(manager: Manager) -> None:
    """Let a request in, and then an update, which holds another request back."""
    assert (await begin_request(manager)).done()
    await manager.model_update_lock.release_reader()
    async with asyncio.timeout(PATIENCE_S), no_requests_running(manager):
        held = await begin_request(manager)
        assert not held.done()
    await held


@pytest.mark.parametrize("ticks", range(8))
def test_cancelled_update_leaves_no_lock_held(ticks: int) -> None:
    """Cancel ``ticks`` ticks of the loop after the last request's end."""

    async def play() -> None:
        manager = Manager()
        await begin_request(manager)
        updating = asyncio.create_task(hold(manager))
        await until_idle()
        await manager.model_update_lock.release_reader()
        await tick(ticks)
        updating.cancel()
        await asyncio.wait({updating})
        assert updating.cancelled()
        await expect_lock_free(manager)

    run(play())


def test_pause_ends_wait_for_requests() -> None:
    """Requests running at the pause would never finish."""

    async def play() -> None:
        manager = Manager()
        await begin_request(manager)
        manager.is_pause = True
        async with asyncio.timeout(PATIENCE_S), no_requests_running(manager):
            pass
        await manager.model_update_lock.release_reader()
        manager.is_pause = False
        await expect_lock_free(manager)

    run(play())


def test_queued_request_goes_on_after_update_is_cancelled() -> None:
    """An earlier request still runs."""

    async def play() -> None:
        manager = Manager()
        await begin_request(manager)
        updating = asyncio.create_task(hold(manager))
        await until_idle()
        queued = await begin_request(manager)
        assert not queued.done()
        updating.cancel()
        await asyncio.wait({updating})
        async with asyncio.timeout(PATIENCE_S):
            await queued

    run(play())


def test_request_during_paused_update_is_let_in() -> None:
    """The server queues the request, like any request during a pause."""

    async def play() -> None:
        manager = Manager()
        await begin_request(manager)
        manager.is_pause = True
        async with asyncio.timeout(PATIENCE_S), no_requests_running(manager):
            assert (await begin_request(manager)).done()

    run(play())


def test_wait_for_requests_times_out() -> None:
    async def play() -> None:
        manager = Manager()
        await begin_request(manager)
        block = NoRequestsRunning(manager, None, Capabilities())._locked(Deadline(0.01))  # type: ignore[arg-type]
        with pytest.raises(Conflict, match="requests still ran"):
            async with asyncio.timeout(PATIENCE_S), block:
                pass
        await manager.model_update_lock.release_reader()
        await expect_lock_free(manager)

    run(play())
