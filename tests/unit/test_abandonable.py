"""A stuck call is left behind, and its late result is dropped."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch

from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.vocabulary.errors import Dropped

LONG_S = 60


def go_on() -> None:
    pass


def threads_named(name: str = "inflight-aside") -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == name}


def give_up_when(event: threading.Event) -> Callable[[], None]:
    def check() -> None:
        assert event.wait(LONG_S)
        raise Dropped("time is up")

    return check


def test_calls_run_in_order_on_one_thread() -> None:
    with AbandonableThread(go_on) as aside:
        threads = {aside.do(threading.current_thread) for _ in range(3)}
        assert [aside.do(partial(pow, i, 2)) for i in range(4)] == [0, 1, 4, 9]
        assert aside.do(torch.is_grad_enabled) is False
    (thread,) = threads
    assert thread is not threading.current_thread()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_error_reaches_caller_and_next_call_runs() -> None:
    with AbandonableThread(go_on) as aside:
        with pytest.raises(ZeroDivisionError):
            aside.do(lambda: 1 / 0)
        assert aside.do(lambda: 5) == 5


def test_stuck_call_is_abandoned_and_result_dropped() -> None:
    before = threads_named()
    began, may_end = threading.Event(), threading.Event()
    late = []

    class Answer:
        pass

    def stuck() -> Answer:
        began.set()
        assert may_end.wait(LONG_S)
        answer = Answer()
        late.append(weakref.ref(answer))
        return answer

    with (
        pytest.raises(Dropped, match="time is up"),
        AbandonableThread(give_up_when(began)) as aside,
    ):
        aside.do(stuck)
    (thread,) = threads_named() - before
    assert thread.is_alive()
    # the stuck call must not hold up the next thread
    with AbandonableThread(go_on) as another:
        assert another.do(lambda: 1) == 1
    may_end.set()
    thread.join(LONG_S)
    assert not thread.is_alive()
    del aside
    assert [reference() for reference in late] == [None]


def test_thread_keeps_no_reference_to_result() -> None:
    """A tensor of a gigabyte must not stay until the next call is made."""
    with AbandonableThread(go_on) as aside:
        answer = weakref.ref(aside.do(lambda: torch.ones(3)))
        # the thread drops the result of a call when the next call ends
        aside.do(go_on)
        assert answer() is None
