"""The launching process of workers hears that it was told to go, and so does its HTTP server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from sglang_inflight.frontend.workers.told_to_go import ToldToGo


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Signals that came, as the handlers were told that were there first."""
    numbers: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: numbers.append(number))
        for number in (signal.SIGHUP, signal.SIGTERM)
    }
    wakeup = signal.set_wakeup_fd(-1)
    yield numbers
    signal.set_wakeup_fd(wakeup)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_it_hears_what_ends_a_server(handled: list[int]) -> None:
    async def do() -> None:
        told = asyncio.ensure_future(ToldToGo().wait())
        # uvicorn starts its workers anew
        signal.raise_signal(signal.SIGHUP)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not told.done()
        signal.raise_signal(signal.SIGTERM)
        await told

    asyncio.run(do())
    assert handled == [signal.SIGHUP, signal.SIGTERM]
