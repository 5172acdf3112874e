"""Pipeline requests prefilled before their microbatch's turn was held."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight.scheduler import hooks
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
    monkeypatch.setattr(hooks, "get_parallel", lambda: SimpleNamespace(pp_size=2))
    inflight = SimpleNamespace(hold=SimpleNamespace(keeps_back_requests=True), parked_batches=[])
    last_mbs = [SimpleNamespace(reqs=[Req(finished=True), Req()]), None]
    return SimpleNamespace(inflight=inflight, last_mbs=last_mbs)


def test_pipeline_with_a_pending_turn_is_not_idle(stage: Any) -> None:
    def sglang_sees_nothing(_: object) -> bool:
        return True

    assert not hooks.is_idle(sglang_sees_nothing, stage)
    checked: list[object] = []
    hooks.skip_idle_work_while_held(checked.append, stage)
    assert checked == []
    assert hooks.include_held_batches(lambda _: [], stage) == [stage.last_mbs[0]]

    stage.inflight.hold.keeps_back_requests = False
    assert hooks.is_idle(sglang_sees_nothing, stage)
    hooks.skip_idle_work_while_held(checked.append, stage)
    assert checked == [stage]
    assert hooks.include_held_batches(lambda _: [], stage) == []


def test_finished_request_keeps_no_pipeline_busy(stage: Any) -> None:
    stage.last_mbs[0].reqs.pop()
    assert hooks.is_idle(lambda _: True, stage)
