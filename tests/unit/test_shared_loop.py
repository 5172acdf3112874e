"""One event loop for many waiting threads, run by any of them."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
import uvloop

from sglang_inflight.frontend.engine.shared_loop import share
from tests.support import forked

WAIT_S = 60

# In a process of its own: nest_asyncio, installed with SGLang, patches all of asyncio.
IN_A_NOTEBOOK = """
import asyncio
from types import SimpleNamespace

import nest_asyncio

from sglang_inflight.frontend.engine.methods import METHODS
from sglang_inflight.frontend.engine.shared_loop import share

async def answer(_):
    await asyncio.sleep(0)
    return "not paused"

async def cell():
    loop = asyncio.get_running_loop()
    share(loop)
    lifetime = SimpleNamespace(unless_shut_down=lambda work: work)
    frontend = SimpleNamespace(handlers={"is_paused": answer}, lifetime=lifetime)
    manager = SimpleNamespace(why_inactive=None, event_loop=loop, inflight=frontend)
    print(METHODS["is_paused"].waiting(SimpleNamespace(tokenizer_manager=manager, loop=loop)))

loop = asyncio.SelectorEventLoop()
asyncio.set_event_loop(loop)
nest_asyncio.apply(loop)
loop.run_until_complete(cell())
"""


@pytest.fixture(
    params=[asyncio.SelectorEventLoop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    """A shared loop, run by nobody yet."""
    make: Callable[[], asyncio.AbstractEventLoop] = request.param
    loop = make()
    share(loop)
    yield loop
    if not loop.is_closed():
        loop.close()


class Call:
    """A coroutine with a record of its progress."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.was_cancelled = False
        self._may_end = asyncio.Event()

    async def __call__(self) -> str:
        self.begun.set()
        try:
            await self._may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return "done"

    async def allow_end(self) -> None:
        self._may_end.set()


def test_threads_take_turns_driving_loop(loop: asyncio.AbstractEventLoop) -> None:
    """One thread drives until its own work is done, then another thread drives."""
    first, second = Call(), Call()
    with ThreadPoolExecutor() as threads:
        results = [threads.submit(lambda: loop.run_until_complete(first()))]
        assert first.begun.wait(WAIT_S)
        results.append(threads.submit(lambda: loop.run_until_complete(second())))
        assert second.begun.wait(WAIT_S)
        loop.run_until_complete(first.allow_end())
        assert results[0].result(WAIT_S) == "done"
        loop.run_until_complete(second.allow_end())
        assert results[1].result(WAIT_S) == "done"


def test_error_of_the_coroutine_is_raised(loop: asyncio.AbstractEventLoop) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop.run_until_complete(fail())


def test_call_on_a_loop_run_by_its_owner_returns(loop: asyncio.AbstractEventLoop) -> None:
    """An engine made under ``asyncio.run``, called by an executor's thread."""
    call = Call()
    owner = threading.Thread(target=loop.run_forever)
    owner.start()
    try:
        with ThreadPoolExecutor() as threads:
            result = threads.submit(lambda: loop.run_until_complete(call()))
            assert call.begun.wait(WAIT_S)
            assert loop.run_until_complete(asyncio.sleep(0, "beside")) == "beside"
            loop.run_until_complete(call.allow_end())
            assert result.result(WAIT_S) == "done"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        owner.join()


def test_waiting_thread_drives_after_the_owner_stops(loop: asyncio.AbstractEventLoop) -> None:
    """A waiting thread drives on."""
    call = Call()

    async def own(submit: Callable[[], None]) -> None:
        submit()
        await asyncio.to_thread(call.begun.wait, WAIT_S)

    with ThreadPoolExecutor() as threads:
        results = []
        # the loop's owner does not use the shared method
        type(loop).run_until_complete(
            loop, own(lambda: results.append(threads.submit(loop.run_until_complete, call())))
        )
        loop.run_until_complete(call.allow_end())
        assert results[0].result(WAIT_S) == "done"


@pytest.mark.parametrize("other", [False, True], ids=["the same", "another"])
def test_call_within_a_running_loop_is_refused(
    loop: asyncio.AbstractEventLoop, other: bool
) -> None:
    """Refused before anything is done, and the running loop goes on."""
    call = Call()

    async def wait_in_the_loop() -> str:
        with pytest.raises(RuntimeError, match="runs an event loop"):
            loop.run_until_complete(call())
        await asyncio.sleep(0)
        return "on"

    running = asyncio.new_event_loop() if other else loop
    assert running.run_until_complete(wait_in_the_loop()) == "on"
    if other:
        running.close()
    loop.run_until_complete(asyncio.sleep(0))
    assert not call.begun.is_set()


def test_call_on_a_closed_loop_is_refused(loop: asyncio.AbstractEventLoop) -> None:
    call = Call()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_until_complete(call())
    assert not call.begun.is_set()


def test_owners_cancel_reaches_waiting_thread(loop: asyncio.AbstractEventLoop) -> None:
    """``asyncio.run`` cancels all tasks at its end, and no thread may wait for them."""
    call = Call()

    async def own(submit: Callable[[], None]) -> None:
        submit()
        await asyncio.to_thread(call.begun.wait, WAIT_S)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    with ThreadPoolExecutor() as threads:
        results = []
        type(loop).run_until_complete(
            loop, own(lambda: results.append(threads.submit(loop.run_until_complete, call())))
        )
        with pytest.raises(CancelledError):
            results[0].result(WAIT_S)
    assert call.was_cancelled


def test_ctrl_c_cancels_waiting_call(loop: asyncio.AbstractEventLoop) -> None:
    """An interrupted call does not run later."""
    call = Call()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        assert call.begun.wait(WAIT_S)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(call())
    thread.join()
    loop.run_until_complete(asyncio.sleep(0))
    assert call.was_cancelled


def test_call_in_a_notebook_returns() -> None:
    """Our methods work in a notebook like SGLang's."""
    assert forked.run(["-c", IN_A_NOTEBOOK], wait_s=WAIT_S) == "not paused\n"
