"""Moves of the pause machine, carried out on a scheduler."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_inflight.messages import ContinueCall, PauseCall, PauseMode
from sglang_inflight.scheduler.pause import pause as module
from sglang_inflight.scheduler.pause.machine import Drained, WaitOver
from sglang_inflight.scheduler.pause.pause import Pause


class Request:
    to_finish = None


class Scheduler:
    """Records its calls, and holds two requests until they are aborted."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.running: set[Any] = {object(), object()}
        self.chunked_req = self.cur_batch_for_debug = None
        self.disaggregation_mode = DisaggregationMode.NULL
        # without a socket the pause does not sleep
        self.ipc_channels = SimpleNamespace(recv_from_tokenizer=None)
        self.fails = False
        self.waiting: list[Any] = []
        self.elsewhere: list[Any] = []
        self.live: list[Any] = []

    # methods of a scheduler

    def pause_generation(self, request: Any) -> None:
        self.told.append(f"pause {request.mode}")

    def continue_generation(self, request: Any) -> None:
        self.told.append(f"continue, torch_empty_cache={request.torch_empty_cache}")

    def abort_request(self, request: Any) -> None:
        self.told.append("abort")

    # methods of its boundary

    def drain(self) -> None:
        pass

    def forget_finished(self) -> None:
        """Do nothing: no batch is here."""

    def prepare_to_hold(self) -> None:
        self.drain()

    def retract(self) -> int:
        if self.fails:
            raise RuntimeError("no memory")
        self.told.append("retract")
        return len(self.running)

    @property
    def requests(self) -> Any:
        """The census of its requests."""
        return SimpleNamespace(
            pending_batches=(),
            may_be_written_to=False,
            running=lambda: self.running,
            begun=lambda: {*self.running, *self.elsewhere},
            waiting=lambda: self.waiting,
            live=lambda: self.live,
            between_servers=lambda: self.elsewhere,
        )


class Answers:
    def __init__(self) -> None:
        self.given: list[tuple[str, Any]] = []

    def succeed(self, call: Any, answer: Any) -> None:
        self.given.append((call.call_id, answer))

    def fail(self, call: Any, error: Exception) -> None:
        self.given.append((call.call_id, str(error)))


class Rank:
    def __init__(self) -> None:
        self.scheduler, self.answers = Scheduler(), Answers()
        none = SimpleNamespace(set=lambda _: None, inc=lambda _: None)
        parts: tuple[Any, ...] = (
            self.scheduler,
            self.scheduler,
            self.answers,
            SimpleNamespace(paused=none, paused_seconds=none),
        )
        self.pause = Pause(*parts)

    def ask(self, mode: PauseMode, call_id: str, lease_s: float | None = None) -> None:
        call = PauseCall(call_id=call_id, mode=mode, pause_id="p", lease_s=lease_s, timeout_s=60.0)
        self.pause.ask(call)

    def state(self) -> str:
        return self.pause.state.value


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr(module, "is_true_on_any_rank", lambda here: here)
    return Rank()


def test_failed_retract_leaves_state_unchanged(rank: Rank) -> None:
    rank.scheduler.fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        rank.ask("retract", "first")
    assert rank.state() == "running"
    assert rank.answers.given == []
    rank.scheduler.fails = False
    rank.ask("retract", "second")
    assert rank.state() == "frozen"
    [(call_id, answer)] = rank.answers.given
    assert (call_id, answer.mode, answer.retracted) == ("second", "retract", 2)
    assert rank.scheduler.told == ["retract", "pause in_place"]


def test_abort_answer_counts_aborted_requests(rank: Rank) -> None:
    rank.ask("abort", "first")
    assert not rank.pause.holds_the_loop()
    # the same pause asked again, while the first call's requests still end
    rank.ask("abort", "second")
    [(call_id, said)] = rank.answers.given
    assert (call_id, "took its place" in said) == ("first", True)
    rank.scheduler.running = set()
    rank.pause._make_transition(Drained(time.monotonic()))
    call_id, answer = rank.answers.given[-1]
    assert (call_id, answer.aborted, answer.running) == ("second", 2, 0)
    assert rank.pause._aborted == {}


@pytest.mark.parametrize("ends", ["the requests", "the wait"])
def test_lease_starts_at_the_grant(rank: Rank, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """The lease counts by the local clock: the first rank may run on another machine."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(pp_size=1))
    over: list[Any] = []
    monkeypatch.setattr(module, "broadcast_from_first_rank", lambda here: over)
    rank.ask("wait", "first", lease_s=1.0)
    now = 50.0
    assert not rank.pause.holds_the_loop()
    assert rank.pause.describe().holders[0].lease_left_s == 1.0
    if ends == "the wait":
        over.append(WaitOver("p", 1e9))
        rank.pause._check_the_clock()
    else:
        rank.pause._make_transition(Drained(now))
    assert rank.state() == "frozen"
    assert rank.pause.describe().holders[0].lease_left_s == 1.0


def test_only_a_freeze_is_continued(rank: Rank) -> None:
    rank.ask("in_place", "first")
    rank.ask("wait", "second")
    told = ["pause in_place", "continue, torch_empty_cache=False"]
    assert rank.scheduler.told == told
    rank.pause.resume(ContinueCall(call_id="third", torch_empty_cache=True))
    assert rank.scheduler.told == told
    assert rank.state() == "running"


def test_draining_pause_admits_requests_in_transfer(rank: Rank) -> None:
    coming: Any = Request()
    later: Any = Request()
    rank.scheduler.elsewhere = [coming]
    rank.ask("wait", "first")
    assert (rank.pause.admits(coming), rank.pause.admits(later)) == (True, False)
    rank.scheduler.running = set()
    assert not rank.pause._still_drains()
    # the request has arrived, and waits for its turn
    rank.scheduler.elsewhere, rank.scheduler.waiting = [], [coming, later]
    assert rank.pause._still_drains()
    rank.scheduler.waiting = [later]
    assert not rank.pause._still_drains()


def test_abort_waits_for_aborted_transfers(rank: Rank) -> None:
    """Only the loop can free the request's memory."""
    rank.scheduler.elsewhere = [Request()]
    rank.ask("abort", "first")
    rank.scheduler.running = set()
    assert rank.pause._still_drains()
    rank.scheduler.elsewhere = []
    assert not rank.pause._still_drains()


def test_timeout_extension_is_at_most_the_time_waited(rank: Rank) -> None:
    """One request from before the pause, one from within the pause, and one that has not waited
    yet.
    """
    began = time.perf_counter()
    times = [began - 1, began, 0.0]
    stats = [SimpleNamespace(wait_queue_entry_time=at, forward_entry_time=at) for at in times]
    rank.scheduler.live = [SimpleNamespace(time_stats=each) for each in stats]
    rank.ask("in_place", "first")
    rank.pause._frozen_at = began - 100
    rank.pause.resume(ContinueCall(call_id="second"))
    now = time.perf_counter()
    for each in stats[:2]:
        assert began <= each.wait_queue_entry_time <= now
        assert began <= each.forward_entry_time <= now
    assert (stats[2].wait_queue_entry_time, stats[2].forward_entry_time) == (0.0, 0.0)
