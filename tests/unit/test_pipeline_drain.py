"""Calls deferred to a drained pipeline are handled in the order of their arrival."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight.scheduler.pause import pipeline_drain
from sglang_inflight.scheduler.pause.pipeline_drain import PipelineDrain


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Requests of a pipeline stage with one microbatch in flight."""
    monkeypatch.setattr(pipeline_drain, "get_parallel", lambda: SimpleNamespace(pp_size=2))
    return SimpleNamespace(pending_batches=["a microbatch"])


def test_deferred_calls_keep_their_order(requests: Any) -> None:
    still = PipelineDrain(requests)
    handled: list[str] = []
    always = still.defer(handled.append)
    sometimes = still.defer(handled.append, lambda call: call == "recompute")

    sometimes("keep")
    assert handled == ["keep"]
    always("pause")
    # this call needs no drained pipeline, and must not overtake an earlier call
    sometimes("keep again")
    assert handled == ["keep"]
    assert still.is_waited_for
    assert still.run_if_drained()

    requests.pending_batches.clear()
    assert not still.run_if_drained()
    assert handled == ["keep", "pause", "keep again"]
    assert not still.is_waited_for
    always("continue")
    assert handled[-1] == "continue"
