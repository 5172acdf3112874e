"""The launching process of workers notices a shutdown signal, beside its HTTP server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from sglang_inflight.extensions.workers.shutdown_signal import ShutdownSignal


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Signals received by the earlier handlers."""
    numbers: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: numbers.append(number))
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT)
    }
    wakeup = signal.set_wakeup_fd(-1)
    yield numbers
    signal.set_wakeup_fd(wakeup)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_sigterm_is_noticed_and_sighup_is_not(handled: list[int]) -> None:
    async def do() -> None:
        told = asyncio.Event()
        listening = asyncio.ensure_future(ShutdownSignal().listen(told.set))
        # uvicorn restarts its workers
        signal.raise_signal(signal.SIGHUP)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not told.is_set()
        signal.raise_signal(signal.SIGTERM)
        await told.wait()
        listening.cancel()

    asyncio.run(do())
    assert handled == [signal.SIGHUP, signal.SIGTERM]


def test_sigquit_reaches_sglangs_replaced_handler(
    handled: list[int],
) -> None:
    async def do() -> None:
        ended = asyncio.Event()
        replaced: list[int] = []

        def end(number: int, _: object) -> None:
            handled.append(number)
            ended.set()

        signal.signal(signal.SIGQUIT, end)
        shutdown_signal = ShutdownSignal()
        signal.signal(signal.SIGQUIT, lambda number, _: replaced.append(number))
        listening = asyncio.ensure_future(shutdown_signal.listen(lambda: None))
        signal.raise_signal(signal.SIGQUIT)
        await ended.wait()
        listening.cancel()
        assert replaced == [signal.SIGQUIT]

    asyncio.run(do())
    assert handled == [signal.SIGQUIT]


def test_sigquit_is_left_to_the_handler_in_place(handled: list[int]) -> None:
    async def do() -> None:
        told = asyncio.Event()
        listening = asyncio.ensure_future(ShutdownSignal().listen(told.set))
        signal.raise_signal(signal.SIGQUIT)
        signal.raise_signal(signal.SIGTERM)
        await told.wait()
        listening.cancel()

    asyncio.run(do())
    assert handled == [signal.SIGQUIT, signal.SIGTERM]
