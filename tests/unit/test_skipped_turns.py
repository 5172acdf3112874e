"""Pipeline requests prefilled before their microbatch's turn was held."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight.scheduler import hold
from sglang_inflight.scheduler.pause.pipeline_drain import SkippedTurns


class Req:
    def __init__(self, *, finished: bool = False) -> None:
        self._finished = finished

    def finished(self) -> bool:
        return self._finished


def test_held_turn_is_pending_until_every_microbatch_ran() -> None:
    turns = SkippedTurns()
    turns.begin(held=False, microbatches=3)
    assert not turns.pending
    turns.begin(held=True, microbatches=3)
    # the other two microbatches have their turns first
    for still_pending in (True, True, False, False):
        turns.begin(held=False, microbatches=3)
        assert turns.pending is still_pending


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stage that generates again, in the turn of an empty microbatch. The other microbatch has a
    prefilled request in no batch visible to SGLang.
    """
    monkeypatch.setattr(hold, "get_parallel", lambda: SimpleNamespace(pp_size=2))
    monkeypatch.setattr(hold.Hold, "keeps_back_requests", True)
    last_mbs = [SimpleNamespace(reqs=[Req(finished=True), Req()]), None]
    held: Any = hold.Hold.__new__(hold.Hold)
    held._scheduler = SimpleNamespace(last_mbs=last_mbs)
    held._boundary = SimpleNamespace(requests=SimpleNamespace(parked_batches=[]))
    return held


def sglang_sees_nothing() -> bool:
    return True


def test_pipeline_with_a_pending_turn_is_not_idle(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not stage.is_idle(sglang_sees_nothing)
    checked: list[str] = []
    stage.skip_idle_work(lambda: checked.append("idle"))
    assert checked == []
    assert stage.include_held_batches(list) == [stage._scheduler.last_mbs[0]]

    monkeypatch.setattr(hold.Hold, "keeps_back_requests", False)
    assert stage.is_idle(sglang_sees_nothing)
    stage.skip_idle_work(lambda: checked.append("idle"))
    assert checked == ["idle"]
    assert stage.include_held_batches(list) == []


def test_finished_request_keeps_no_pipeline_busy(stage: Any) -> None:
    stage._scheduler.last_mbs[0].reqs.pop()
    assert stage.is_idle(sglang_sees_nothing)
