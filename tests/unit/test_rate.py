"""Pacing cuts copies and sleeps. The copied values must stay the same."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from sglang_inflight.scheduler.update import rate
from sglang_inflight.scheduler.update.rate import RateLimit, copy_in_pieces

PIECE = 1 << 10  # bytes in one go
RATE = round(PIECE / rate._PIECE_S)


class Clock:
    """Time moved by sleep and work alone."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        # CPU time of the spending thread
        self.worked = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def thread_time(self) -> float:
        return self.worked

    def work(self, seconds: float) -> None:
        self.worked += seconds
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    monkeypatch.setattr(time, "thread_time", clock.thread_time)
    return clock


def test_rate_is_kept_while_requests_run(clock: Clock) -> None:
    own = RateLimit(RATE, is_busy=lambda: True)
    began = clock.now
    for _ in range(640):
        own.spend(PIECE // 10)
    # except a piece at the start and a piece still owed
    assert clock.now - began == pytest.approx(640 * (PIECE // 10) / RATE, abs=2 * rate._PIECE_S)
    assert min(clock.slept) > rate._SHORTEST_SLEEP_S


def test_idle_or_unlimited_rate_does_not_sleep(clock: Clock) -> None:
    RateLimit(RATE, is_busy=lambda: False).spend(1 << 30)
    RateLimit(0, is_busy=lambda: True).spend(1 << 30)
    assert clock.slept == []


def load(own: RateLimit, clock: Clock, tensors: int, python_s: float) -> float:
    """Return the seconds for loading small tensors, each with ``python_s`` of Python."""
    began = clock.now
    own.spend(0)
    for _ in range(tensors):
        clock.work(python_s)
        own.spend(1)
    return clock.now - began


def test_interpreter_share_limits_small_tensors(clock: Clock) -> None:
    own = RateLimit(1 << 40, is_busy=lambda: True, interpreter_share=0.25)
    worked = 10_000 * 0.0003
    # except a piece at the start and a piece still owed
    took = load(own, clock, 10_000, 0.0003)
    assert took == pytest.approx(worked / 0.25, abs=2 * rate._PIECE_S)


def test_kernel_time_is_not_interpreter_time(clock: Clock) -> None:
    """A kernel releases the interpreter, and its bytes are counted elsewhere."""
    own = RateLimit(1 << 40, is_busy=lambda: True, interpreter_share=0.25)
    assert load(own, clock, 1000, 0.004) == pytest.approx(4.0)


def test_hash_is_not_interpreter_time(clock: Clock) -> None:
    own = RateLimit(1 << 40, is_busy=lambda: True, interpreter_share=0.25)
    own.spend(0)
    began = clock.now
    for _ in range(1000):
        clock.work(0.0004)
        own.leave_out_time()
        own.spend(1 << 20)
    assert clock.now - began == pytest.approx(0.4)


def test_python_of_a_loader_is_made_up_for(clock: Clock) -> None:
    """Nothing in a loader calls ``spend``."""
    own = RateLimit(1 << 40, is_busy=lambda: True, interpreter_share=0.25)
    own.spend(0)
    began = clock.now
    for _ in range(10):
        clock.work(0.02)
        own.spend_python()
    assert clock.now - began == pytest.approx(10 * 0.02 / 0.25, abs=2 * rate._PIECE_S)


@pytest.mark.parametrize(
    "own", [RateLimit(1 << 40, lambda: True), RateLimit(0, lambda: True, 0.25)]
)
def test_unlimited_interpreter_share_does_not_sleep(clock: Clock, own: RateLimit) -> None:
    assert load(own, clock, 1000, 0.0003) == pytest.approx(0.3)


def test_interpreter_time_is_counted_per_thread(clock: Clock) -> None:
    own = RateLimit(1 << 40, is_busy=lambda: True, interpreter_share=0.25)
    load(own, clock, 1, 0.0003)
    clock.work(100)
    other = own.for_another_thread()
    assert load(other, clock, 1000, 0.0003) == pytest.approx(1.2, abs=2 * rate._PIECE_S)


def walk(clock: Clock) -> None:
    for _ in range(1000):
        clock.work(0.0003)
        rate.yield_gil()


def test_paced_items_are_all_yielded_and_sleep(clock: Clock) -> None:
    def staging() -> None:
        RateLimit(1 << 40, is_busy=lambda: True, interpreter_share=0.25).limit_this_thread()
        for item in rate.paced(range(10_000)):
            clock.work(0.000_003)
            taken.append(item)

    taken: list[int] = []
    began = clock.now
    thread = threading.Thread(target=staging)
    thread.start()
    thread.join()
    assert taken == [*range(10_000)]
    assert clock.now - began - 0.03 == pytest.approx(0.09, abs=2 * rate._PIECE_S)


def test_walk_sleeps_in_a_thread_that_does_not_stage(clock: Clock) -> None:
    """A thread for each, because a limit stays with its thread."""

    def staging() -> None:
        RateLimit(1 << 40, is_busy=lambda: True, interpreter_share=0.25).limit_this_thread()
        walk(clock)

    slept: list[float] = []
    for work in (lambda: walk(clock), staging):
        began = clock.now
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        slept.append(clock.now - began - 0.3)
    assert slept == pytest.approx([0.0, 0.9], abs=2 * rate._PIECE_S)


@pytest.fixture
def switch_interval() -> Iterator[float]:
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


def test_switch_interval_is_set(switch_interval: float) -> None:
    rate.switch_often(0.0002)
    assert sys.getswitchinterval() == pytest.approx(0.0002)


def test_switch_interval_zero_keeps_pythons(switch_interval: float) -> None:
    rate.switch_often(0)
    assert sys.getswitchinterval() == switch_interval


def test_sleep_ends_with_the_last_request(clock: Clock) -> None:
    own = RateLimit(RATE, is_busy=lambda: len(clock.slept) < 3)
    own.spend(1 << 30)
    assert len(clock.slept) == 3
    # the debt is dropped
    own.spend(PIECE // 10)
    assert len(clock.slept) == 3


@pytest.mark.parametrize(
    ("target", "source"),
    [
        pytest.param(torch.zeros(300, 64), torch.randn(300, 64), id="rows"),
        pytest.param(torch.zeros(300, 64).bfloat16(), torch.randn(300, 64), id="other dtype"),
        pytest.param(torch.zeros(64, 300), torch.randn(300, 64).T, id="transposed"),
        pytest.param(torch.zeros(9000), torch.randn(9000), id="vector"),
        pytest.param(torch.zeros(3, 64, 300), torch.randn(3, 64, 300), id="rows above a piece"),
        pytest.param(torch.zeros(300, 64), torch.randn(64), id="broadcast"),
        pytest.param(torch.zeros(()), torch.randn(()), id="scalar"),
        pytest.param(torch.zeros(0, 64), torch.randn(0, 64), id="empty"),
    ],
)
def test_copy_in_pieces_equals_copy(
    target: torch.Tensor, source: torch.Tensor, clock: Clock
) -> None:
    copy_in_pieces(RateLimit(RATE, is_busy=lambda: True), target, source)
    assert torch.equal(target, source.to(target.dtype).expand_as(target))


def test_piece_is_within_byte_limit(clock: Clock) -> None:
    own = RateLimit(RATE, is_busy=lambda: True)
    rows = [tuple(map(len, piece)) for piece in own.cut(torch.zeros(300, 4), torch.zeros(300, 4))]
    assert sum(of for _, of in rows) == 300
    assert all(to == of and 2 * to * 4 * 4 <= PIECE for to, of in rows)


@pytest.mark.parametrize("rows", [1, 3000])
def test_loader_copies_are_rate_limited(rows: int, clock: Clock) -> None:
    began = clock.now
    copies = 3000 // rows * 10
    own = RateLimit(RATE, is_busy=lambda: True)
    # part of a sent tensor goes to part of a fused parameter
    sent, parameter = torch.ones(2 * rows, 8), torch.zeros(rows, 8)
    for _ in range(copies):
        copy_in_pieces(own, parameter, sent[rows:])
    assert torch.equal(parameter, sent[:rows])
    touched = copies * 2 * parameter.nbytes
    assert clock.now - began == pytest.approx(touched / RATE, abs=2 * rate._PIECE_S)
    assert max(clock.slept) <= 2 * rate._PIECE_S
