"""Hollow weights are served when all ranks have filled theirs, and no sooner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight.extensions.memory.machine import KV_CACHE, PRESENT, WEIGHTS, Where
from sglang_inflight.extensions.memory.on_rank import MemoryRelease
from sglang_inflight.scheduler.pause.machine import PauseState
from sglang_inflight.scheduler.update import hollow
from sglang_inflight.scheduler.update.hollow import HollowWeights
from sglang_inflight.scheduler.update.live_machine import Empty, Open
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.swap import PreparedSwap
from sglang_inflight.vocabulary.answers import MemoryStatus
from sglang_inflight.vocabulary.labels import VersionLabel


class Rank:
    """One rank's hollow weights, and its extension that releases memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, others_miss: bool = False) -> None:
        monkeypatch.setattr(hollow, "is_true_on_any_rank", lambda here: here or others_miss)
        monkeypatch.setattr(hollow, "get_parallel", lambda: SimpleNamespace(pp_size=1))
        scheduler: Any = SimpleNamespace(device="cpu")
        self.live = LiveWeights(scheduler)
        self.told: list[str] = []
        pause: Any = SimpleNamespace(
            state=PauseState.RUNNING, hold_for_memory=self._hold, memory_is_back=self._go_on
        )
        self.pause = pause
        staging: Any = SimpleNamespace(
            can=SimpleNamespace(keep_weights=None), why_not_filled=None, refusal=None
        )
        answers: Any = SimpleNamespace(
            send_generation_continues=lambda: self.told.append("generation continues")
        )
        self.release: Any = MemoryRelease.__new__(MemoryRelease)
        self.release._live, self.release._pause = self.live, self.pause
        self.release._memory, self.release._until_filled = PRESENT, False
        self.hollow = HollowWeights(
            scheduler,
            pause,
            staging,
            self.live,
            answers,
            on_change=self.release.follow_contents,
            require_update=False,
        )

    def _hold(self, why: str) -> None:
        self.pause.state = PauseState.FROZEN

    def _go_on(self) -> None:
        self.pause.state = PauseState.RUNNING

    def wait_until_filled(self) -> None:
        """Resume lost weights, and have requests wait."""
        self.live.move(Empty("for a test"))
        self.release._until_filled = True
        self.release._update_hold()
        assert self.pause.state is PauseState.FROZEN

    def fill(self) -> None:
        self.live.move(Open(partial=False))
        self.live.swap_in("new", PreparedSwap(), base=VersionLabel(0, "v0"))
        assert self.live.why_not_served is not None
        self.hollow.after_filling()


def test_generation_continues_when_all_ranks_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.wait_until_filled()
    rank.fill()
    assert (rank.live.why_not_served, rank.live.digest) == (None, "new")
    assert rank.pause.state is PauseState.RUNNING
    assert rank.told == ["generation continues"]


def test_filled_rank_waits_for_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, others_miss=True)
    rank.wait_until_filled()
    rank.fill()
    assert rank.live.hollow == "another rank misses some of them"
    assert (rank.live.digest, rank.told) == (None, [])
    assert rank.pause.state is PauseState.FROZEN


@pytest.mark.parametrize("waits", [True, False])
def test_overwritten_weights_hold_only_requests_that_waited_already(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    rank = Rank(monkeypatch)
    rank.wait_until_filled()
    if not waits:
        rank.fill()
    rank.hollow.overwritten("for another test")
    assert rank.live.hollow == "for another test"
    assert not rank.live.is_named
    assert (rank.pause.state is PauseState.FROZEN) is waits


def test_status_says_which_memory_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    hollow_weights = MemoryStatus(weights="hollow", hollow="for a test")
    assert rank.release.describe(hollow_weights) == hollow_weights
    rank.release._memory = {**PRESENT, WEIGHTS: Where.LOST, KV_CACHE: Where.AWAY}
    status = rank.release.describe(hollow_weights)
    assert (status.weights, status.kv_cache, status.cuda_graph) == ("lost", "away", "present")
