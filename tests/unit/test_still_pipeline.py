"""Calls that wait until nothing is in flight are handled in the order in which they came."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight.scheduler.pause import still_pipeline
from sglang_inflight.scheduler.pause.still_pipeline import StillPipeline


@pytest.fixture
def boundary(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a stage of a pipeline, with one microbatch in flight."""
    monkeypatch.setattr(still_pipeline, "get_parallel", lambda: SimpleNamespace(pp_size=2))
    return SimpleNamespace(pending_batches=["a microbatch"])


def test_the_order(boundary: Any) -> None:
    still = StillPipeline(boundary)
    handled: list[str] = []
    always = still.wait_for(handled.append)
    sometimes = still.wait_for(handled.append, lambda call: call == "recompute")

    sometimes("keep")
    assert handled == ["keep"]
    always("pause")
    # it needs no still pipeline, and must not overtake what does
    sometimes("keep again")
    assert handled == ["keep"]
    assert still.is_waited_for
    assert still.settle()

    boundary.pending_batches.clear()
    assert not still.settle()
    assert handled == ["keep", "pause", "keep again"]
    assert not still.is_waited_for
    always("continue")
    assert handled[-1] == "continue"
