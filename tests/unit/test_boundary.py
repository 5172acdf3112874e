"""What a scheduler holds, wherever it holds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_inflight.scheduler import boundary


def batch(*names: str) -> Any:
    return SimpleNamespace(reqs=list(names))


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One with a request in every place."""
    monkeypatch.setattr(boundary, "get_parallel", lambda: SimpleNamespace(pp_size=1))
    staged = SimpleNamespace(req="backed up by HiSparse")
    return SimpleNamespace(
        _collect_inflight_batches=lambda: [batch("running"), None],
        cur_batch_for_debug=batch("current"),
        result_queue=[(batch("launched"), None)],
        waiting_queue=["waiting"],
        grammar_manager=SimpleNamespace(grammar_queue=["waiting for its grammar"]),
        chunked_req="chunked",
        hisparse_coordinator=SimpleNamespace(ack_staging_queue=[staged]),
        disaggregation_mode=DisaggregationMode.NULL,
    )


def test_every_request_is_found(scheduler: Any) -> None:
    none: Any = None
    live: set[Any] = set(boundary.Boundary(scheduler, none).live_requests())
    assert live == {
        "running",
        "current",
        "launched",
        "waiting",
        "waiting for its grammar",
        "chunked",
        "backed up by HiSparse",
    }


def test_none_where_there_is_none(scheduler: Any) -> None:
    none: Any = None
    scheduler._collect_inflight_batches = list
    scheduler.cur_batch_for_debug = scheduler.chunked_req = scheduler.hisparse_coordinator = None
    scheduler.result_queue, scheduler.waiting_queue = [], []
    scheduler.grammar_manager.grammar_queue = []
    assert boundary.Boundary(scheduler, none).live_requests() == set()


def test_those_between_two_servers_are_found(scheduler: Any) -> None:
    none: Any = None
    scheduler.disaggregation_mode = DisaggregationMode.DECODE
    scheduler.disagg_decode_prealloc_queue = SimpleNamespace(
        queue=[SimpleNamespace(req="asked for")],
        retracted_queue=["backed up"],
        held_rebootstrap_reqs=["to be asked for again"],
    )
    scheduler.disagg_decode_transfer_queue = SimpleNamespace(queue=[SimpleNamespace(req="coming")])
    live: set[Any] = set(boundary.Boundary(scheduler, none).live_requests())
    assert {"asked for", "backed up", "to be asked for again", "coming"} <= live
