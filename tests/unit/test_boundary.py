"""Retraction and abort of a scheduler's requests, in each of its queues."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_inflight.scheduler import boundary
from tests.unit.fakes import QueuedRequest, full_scheduler


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(boundary, "get_parallel", lambda: SimpleNamespace(pp_size=1))
    return full_scheduler(monkeypatch)


def test_requests_in_hisparse_backup_are_retracted(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its prefill and its first decode batch, a backed-up request is in no other batch."""
    decoding, prefilled, earlier = QueuedRequest(row=1), QueuedRequest(row=2), QueuedRequest(row=3)
    last = SimpleNamespace(reqs=[prefilled])
    queue = [SimpleNamespace(req=req) for req in (earlier, prefilled)]
    scheduler.hisparse_coordinator = SimpleNamespace(ack_staging_queue=queue)
    scheduler.collect_inflight_reqs = lambda: {decoding, *last.reqs}
    scheduler.chunked_req, scheduler.result_queue, scheduler.device = None, [], "cpu"
    scheduler.last_batch = None
    scheduler.req_to_token_pool = scheduler.token_to_kv_pool_allocator = None
    scheduler.tree_cache = scheduler._pause_started_at = None
    scheduler._engine_paused = False
    scheduler.waiting_queue = []
    scheduler._add_request_to_queue = scheduler.waiting_queue.append
    told: list[str] = []
    scheduler.pause_generation = lambda request: told.append(request.mode)
    freed: list[Any] = []
    monkeypatch.setattr(boundary, "retract_all", lambda reqs, **_: freed.extend(reqs))
    nothing = SimpleNamespace(inc=lambda _: None)
    metrics: Any = SimpleNamespace(retracted=nothing, recomputed=nothing)
    there = boundary.Boundary(scheduler, metrics)
    running: set[Any] = set(there.requests.running())
    assert running == {decoding, prefilled, earlier}
    assert there.retract() == 3
    # SGLang's own retraction handles requests in batches
    assert (freed, scheduler.waiting_queue, told) == ([earlier], [earlier], ["retract"])


@pytest.mark.parametrize("named", ["step1", None], ids=["one", "all"])
def test_abort_of_waiting_requests_matches_whole_names(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    """Names with a common prefix, in the queues skipped by SGLang's own abort."""
    none: Any = None
    ended: list[str] = []

    def make(name: str) -> Any:
        return SimpleNamespace(rid=name, grammar=None, pd_rebootstrap_forced_output_id=None)

    names = ["step", "step1", "step10"]
    scheduler.disaggregation_mode = DisaggregationMode.DECODE
    scheduler.grammar_manager.grammar_queue = [make(name) for name in names]
    held = [make(name) for name in names]
    scheduler.disagg_decode_prealloc_queue = SimpleNamespace(held_rebootstrap_reqs=held)
    scheduler._release_aborted_request = lambda req: None
    monkeypatch.setattr(boundary, "_make_abort_req", lambda req, reason: req.rid)
    monkeypatch.setattr(boundary, "send_abort_output", lambda _, rid, req: ended.append(rid))
    request: Any = SimpleNamespace(rid=named or "", abort_all=named is None, finished_reason=None)
    boundary.Boundary(scheduler, none).abort_waiting(request)
    assert sorted(ended) == sorted(2 * ([named] if named else names))
    left = scheduler.grammar_manager.grammar_queue
    assert [req.rid for req in left] == [name for name in names if name not in ended]
    left = scheduler.disagg_decode_prealloc_queue.held_rebootstrap_reqs
    assert [req.rid for req in left] == [name for name in names if name not in ended]
