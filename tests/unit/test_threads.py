"""A thread for which there is no memory costs what wanted it, and nobody waits for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sglang_inflight import threads
from sglang_inflight.errors import Refused
from sglang_inflight.scheduler.guard.background import BackgroundHandlers
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.threads import start_thread

PATIENCE_S = 30.0


def nothing() -> None:
    pass


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread ends in its first lines, as it does where these find no memory."""

    def bootstrap(thread: threading.Thread) -> None:
        if not thread.name.startswith("inflight"):
            there(thread)

    there = threading.Thread._bootstrap  # type: ignore[attr-defined]
    monkeypatch.setattr(threading.Thread, "_bootstrap", bootstrap)
    monkeypatch.setattr(threads, "BEGIN_S", 0.1)


def outcome_of(call: Any) -> Any:
    """What ``call`` returns or raises. Fails where it does neither."""
    found: list[Any] = []

    def make() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert found, "it waits for a thread that will never begin"
    return found[0]


@pytest.mark.usefixtures("no_memory")
def test_an_update_is_refused() -> None:
    outcome = outcome_of(lambda: AbandonableThread(nothing))
    assert isinstance(outcome, Refused)
    assert "'inflight-aside' did not begin" in str(outcome)


@pytest.mark.usefixtures("no_memory")
def test_a_handler_of_sglangs_is_answered() -> None:
    scheduler: Any = None
    begin = BackgroundHandlers(scheduler).send(print, lambda request, error: f"{request}: {error}")
    assert outcome_of(lambda: begin("r")).startswith("r: the thread 'inflight-background'")


def test_a_process_that_may_have_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(Refused, match="no thread 'inflight-x' can be started: can't start"):
        start_thread(nothing, name="inflight-x")


def test_a_thread_that_begins_late_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []
    may_begin, ended = threading.Event(), threading.Event()
    there = threading.Thread._bootstrap  # type: ignore[attr-defined]

    def bootstrap(thread: threading.Thread) -> None:
        may_begin.wait(PATIENCE_S)
        there(thread)
        ended.set()

    monkeypatch.setattr(threading.Thread, "_bootstrap", bootstrap)
    monkeypatch.setattr(threads, "BEGIN_S", 0.1)
    with pytest.raises(Refused):
        start_thread(ran.append, True, name="inflight-late")
    may_begin.set()
    assert ended.wait(PATIENCE_S)
    assert ran == []


def test_a_thread_runs() -> None:
    ran = threading.Event()
    start_thread(ran.set, name="inflight-x")
    assert ran.wait(PATIENCE_S)
