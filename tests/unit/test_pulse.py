"""A trainer's death is noticed while its broadcast is awaited."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_inflight.scheduler.groups import groups, process_group
from sglang_inflight.scheduler.groups.groups import Group
from sglang_inflight.scheduler.groups.process_group import Formed, Pulse
from sglang_inflight.vocabulary.answers import CONTROL_SYNC
from sglang_inflight.vocabulary.errors import Refused

PATIENCE = 10_000_000


class Trainer:
    """A trainer's store. A query runs ``check``."""

    def __init__(self, check: Callable[[], object]) -> None:
        self._check = check
        self.questions = 0

    def check(self, keys: list[str]) -> None:
        self.questions += 1
        self._check()


def is_dead() -> None:
    raise RuntimeError("Connection was likely closed")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "ASK_EVERY_S", 0.0)
    monkeypatch.setattr(process_group, "SILENT_S", 0.05)
    monkeypatch.setattr(process_group, "GRACE_S", 0.05)


def until_gone(own: Pulse) -> str:
    for _ in range(PATIENCE):
        if (why := own.why_gone()) is not None:
            return why
    raise AssertionError("it was never missed")


def test_dead_trainer_is_noticed() -> None:
    store: Any = Trainer(is_dead)
    assert until_gone(Pulse(store)) == "its trainer has ended"


def test_silent_trainer_is_noticed() -> None:
    over = threading.Event()
    store: Any = Trainer(over.wait)
    assert "was silent" in until_gone(Pulse(store))
    # no second thread waits beside the first
    assert store.questions == 1
    over.set()


def test_live_trainer_is_asked_repeatedly() -> None:
    store: Any = Trainer(lambda: None)
    own = Pulse(store)
    while store.questions < 5:
        assert own.why_gone() is None


def never() -> None:
    """Never end the update."""


class Unsent:
    """A broadcast without a sender."""

    def is_completed(self) -> bool:
        return False


def test_dead_trainer_ends_update_before_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "broadcast", lambda *args, **kwargs: Unsent())
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    store: Any = Trainer(is_dead)
    pg: Any = object()
    group = Group("g", Formed(pg, store))
    with pytest.raises(Refused, match="'g' will not come: its trainer has ended"):
        group.receive(torch.empty(1), never)
    assert group.describe().startswith("broken: ")


def test_trainer_dead_before_first_broadcast_ends_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first broadcast makes the communicator, and blocks for all ranks."""
    over = threading.Event()
    monkeypatch.setattr(dist, "broadcast", lambda *args, **kwargs: over.wait())
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    store: Any = Trainer(is_dead)
    pg: Any = object()
    with pytest.raises(Refused, match="its trainer has ended"):
        Group("g", Formed(pg, store)).receive(torch.empty(1), never)
    over.set()


def test_slow_live_trainer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Trainer(lambda: None)

    class SentLate(Unsent):
        def is_completed(self) -> bool:
            return bool(store.questions > 3)

        def exception(self) -> None:
            pass

        def wait(self) -> None:
            pass

    monkeypatch.setattr(dist, "broadcast", lambda *args, **kwargs: SentLate())
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    pg: Any = object()
    group = Group("g", Formed(pg, store))
    group.receive(torch.empty(1), never)
    assert group.describe() == CONTROL_SYNC


def test_dead_store_of_a_live_trainer_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store ended with a launcher, the trainer goes on, and the store is not asked again."""
    store: Any = Trainer(is_dead)
    has_ended = threading.Event()
    monkeypatch.setattr(process_group, "GRACE_S", 3600.0)

    class SentLate(Unsent):
        def is_completed(self) -> bool:
            return bool(store.questions) and has_ended.is_set()

        def exception(self) -> None:
            pass

        def wait(self) -> None:
            pass

    monkeypatch.setattr(dist, "broadcast", lambda *args, **kwargs: SentLate())
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    pg: Any = object()
    group = Group("g", Formed(pg, store))
    own: list[Pulse] = []

    class Noted(Pulse):
        def __init__(self, store: Any) -> None:
            super().__init__(store)
            own.append(self)

    monkeypatch.setattr(groups, "Pulse", Noted)

    def check() -> None:
        if own[-1].was_missed:
            has_ended.set()

    group.receive(torch.empty(1), check)
    monkeypatch.setattr(process_group, "GRACE_S", 0.0)
    questions = store.questions
    has_ended.clear()
    looked = iter(range(1000))
    monkeypatch.setattr(SentLate, "is_completed", lambda self: next(looked) > 100)
    group.receive(torch.empty(1), never)
    assert (store.questions, group.describe()) == (questions, CONTROL_SYNC)
