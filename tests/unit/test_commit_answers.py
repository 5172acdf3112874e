"""A commit's stall is its swap's time on the device. The loop does not wait for the swap."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight.messages import CommitCall, Committed
from sglang_inflight.scheduler.update.commit import CommitAnswers
from sglang_inflight.scheduler.update.live_machine import ReadDigest
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.swap import PreparedSwap
from sglang_inflight.vocabulary.kept_kv import FENCE
from sglang_inflight.vocabulary.labels import VersionLabel
from tests.support.device import Device

HOST_MS = 0.5


class Rank:
    def __init__(self, device: str) -> None:
        self.module = Device()
        scheduler: Any = SimpleNamespace(
            device=device, device_module=self.module, forward_stream=self.module.Stream()
        )
        self.live = LiveWeights(scheduler)
        self.live.move(ReadDigest("old"))
        self.said: list[tuple[str, float]] = []
        self.observed: list[float] = []
        answers: Any = SimpleNamespace(
            succeed=lambda call, answer: self.said.append((call.update_id, answer.stall_ms))
        )
        stall = SimpleNamespace(observe=self.observed.append)
        metrics: Any = SimpleNamespace(commit_stall=stall)
        self.answers = CommitAnswers(answers, self.live, metrics)

    def commit(self, update_id: str) -> None:
        self.live.swap_in("new", PreparedSwap(), base=VersionLabel(0, "v0"))
        call = CommitCall(call_id="", update_id=update_id, weight_version="v1", kept_kv=FENCE)
        committed = Committed(
            weight_version="v1",
            base_version="v0",
            epoch=1,
            stall_ms=HOST_MS,
            retracted=0,
            digest="new",
        )
        self.answers.give(call, committed)

    def finish(self, began: float, ended: float) -> None:
        """Complete the last swap on the device."""
        swap = self.live.last_swap
        assert swap is not None
        swap._began.at, swap.ended.at = began, ended


def test_commit_is_answered_after_device_swap() -> None:
    rank = Rank("cuda")
    rank.commit("u")
    rank.answers.give_due()
    assert (rank.said, rank.observed) == ([], [])
    assert rank.live.swapped is not None
    assert not rank.live.swapped.was_waited_for
    rank.finish(100.0, 133.0)
    rank.answers.give_due()
    rank.answers.give_due()
    assert rank.said == [("u", 33.0)]
    assert rank.observed == [pytest.approx(0.033)]


def test_longer_host_time_counts_as_stall() -> None:
    rank = Rank("cuda")
    rank.commit("u")
    rank.finish(100.0, 100.1)
    rank.answers.give_due()
    assert rank.said == [("u", HOST_MS)]


def test_commit_on_a_cpu_is_answered_at_once() -> None:
    rank = Rank("cpu")
    rank.commit("u")
    assert rank.said == [("u", HOST_MS)]


def test_idle_loop_waits_for_the_swap() -> None:
    rank = Rank("cuda")
    rank.commit("u")
    rank.finish(0.0, 7.0)
    rank.answers.give_due(wait=True)
    assert rank.live.swapped.was_waited_for
    assert rank.said == [("u", 7.0)]


def test_each_commit_reports_its_own_stall() -> None:
    rank = Rank("cuda")
    rank.commit("first")
    first = rank.live.last_swap
    rank.commit("second")
    rank.finish(50.0, 52.0)
    rank.answers.give_due()
    # the device swaps in order
    assert rank.said == []
    assert first is not None
    first._began.at, first.ended.at = 0.0, 9.0
    rank.answers.give_due()
    assert rank.said == [("first", 9.0), ("second", 2.0)]
