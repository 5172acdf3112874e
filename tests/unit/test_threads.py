"""A thread that cannot start fails its caller, and nobody waits for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sglang_inflight import threads
from sglang_inflight.scheduler.isolation import BackgroundHandlers
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.threads import start_thread
from sglang_inflight.vocabulary.errors import Refused

PATIENCE_S = 30.0


def do_nothing() -> None:
    pass


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a new thread end in its first lines, like without memory."""

    def bootstrap(thread: threading.Thread) -> None:
        if not thread.name.startswith("inflight"):
            there(thread)

    there = threading.Thread._bootstrap  # type: ignore[attr-defined]
    monkeypatch.setattr(threading.Thread, "_bootstrap", bootstrap)
    monkeypatch.setattr(threads, "BEGIN_S", 0.1)


def outcome_of(call: Any) -> Any:
    """Return the result or error of ``call``. Fail if it does not end."""
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
def test_update_without_a_thread_is_refused() -> None:
    outcome = outcome_of(lambda: AbandonableThread(do_nothing))
    assert isinstance(outcome, Refused)
    assert "'inflight-aside' did not begin" in str(outcome)


@pytest.mark.usefixtures("no_memory")
def test_background_handler_without_a_thread_is_answered() -> None:
    scheduler: Any = None
    begin = BackgroundHandlers(scheduler).send(print, lambda request, error: f"{request}: {error}")
    assert outcome_of(lambda: begin("r")).startswith("r: the thread 'inflight-background'")


def test_thread_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(Refused, match="no thread 'inflight-x' can be started: can't start"):
        start_thread(do_nothing, name="inflight-x")


def test_late_thread_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_start_thread_runs_function() -> None:
    ran = threading.Event()
    start_thread(ran.set, name="inflight-x")
    assert ran.wait(PATIENCE_S)
