"""Requests held by a scheduler in each of its queues, and their retraction and abort."""

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
    """A scheduler with one request in every place."""
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


def test_live_requests_finds_every_queue(scheduler: Any) -> None:
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


def test_live_requests_of_an_idle_scheduler_is_empty(scheduler: Any) -> None:
    none: Any = None
    scheduler._collect_inflight_batches = list
    scheduler.cur_batch_for_debug = scheduler.chunked_req = scheduler.hisparse_coordinator = None
    scheduler.result_queue, scheduler.waiting_queue = [], []
    scheduler.grammar_manager.grammar_queue = []
    assert boundary.Boundary(scheduler, none).live_requests() == set()


def test_live_requests_finds_disaggregation_queues(scheduler: Any) -> None:
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


class Request:
    """An unfinished request."""

    def __init__(self, *, row: int | None = None) -> None:
        self.kv = SimpleNamespace(holds_kv=row is not None, kv_committed_len=0)
        self.is_retracted = False
        self.beam_group = None

    def finished(self) -> bool:
        return False


@pytest.fixture
def decode(scheduler: Any) -> Any:
    """An idle decode server."""
    scheduler._collect_inflight_batches = list
    scheduler.collect_inflight_reqs = set
    scheduler.cur_batch_for_debug = scheduler.chunked_req = scheduler.hisparse_coordinator = None
    scheduler.result_queue, scheduler.waiting_queue = [], []
    scheduler.grammar_manager.grammar_queue = []
    scheduler.disaggregation_mode = DisaggregationMode.DECODE
    scheduler.disagg_decode_prealloc_queue = SimpleNamespace(
        queue=[], retracted_queue=[], held_rebootstrap_reqs=[]
    )
    scheduler.disagg_decode_transfer_queue = SimpleNamespace(
        queue=[], has_pending_deferred_releases=lambda: False
    )
    return scheduler


def test_begun_requests_on_a_decode_server_have_kv(decode: Any) -> None:
    """Every request with KV counts, wherever the KV is."""
    none: Any = None
    transferred, coming, driven_out, asked_for = (Request(row=1), Request(row=2), *_without_kv(2))
    decode.waiting_queue = [transferred]
    decode.disagg_decode_transfer_queue.queue = [SimpleNamespace(req=coming)]
    decode.disagg_decode_prealloc_queue.queue = [SimpleNamespace(req=asked_for)]
    decode.disagg_decode_prealloc_queue.retracted_queue = [driven_out]
    there = boundary.Boundary(decode, none)
    begun: set[Any] = set(there.begun_requests())
    assert begun == {transferred, coming, driven_out}
    # a request in transfer is not here yet, so it does not wait here
    waiting: list[Any] = [transferred, asked_for, driven_out]
    assert there.waiting_requests() == waiting


def test_recompute_is_refused_during_kv_transfers(decode: Any) -> None:
    """Such a request has no row, and its server's cache is not flushed meanwhile."""
    none: Any = None
    there = boundary.Boundary(decode, none)
    assert there.why_not_recomputed() is None
    with_a_row = Request(row=1)
    decode.disagg_decode_transfer_queue.queue = [
        SimpleNamespace(req=req) for req in (with_a_row, *_without_kv(1))
    ]
    assert "2 requests have KV" in (there.why_not_recomputed() or "")


def test_requests_in_hisparse_backup_are_retracted(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its prefill and its first decode batch, a backed-up request is in no other batch."""
    decoding, prefilled, earlier = Request(row=1), Request(row=2), Request(row=3)
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
    running: set[Any] = set(there.running_requests())
    assert running == {decoding, prefilled, earlier}
    assert there.retract() == 3
    # SGLang's own retraction handles requests in batches
    assert (freed, scheduler.waiting_queue, told) == ([earlier], [earlier], ["retract"])


def _without_kv(n: int) -> list[Request]:
    """Return ``n`` requests without KV on this device."""
    return [Request() for _ in range(n)]


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


def test_abort_spares_another_workers_request(scheduler: Any) -> None:
    """Another worker may reuse the name when this worker's request ended or was refused."""
    none: Any = None
    finished = False
    req = SimpleNamespace(rid="name", http_worker_ipc="one", finished=lambda: finished)
    held = boundary.Boundary(scheduler, none)
    held.live_requests = lambda: [req]  # type: ignore[method-assign, assignment, return-value]

    def is_another_workers(rid: str, worker: str | None, *, abort_all: bool = False) -> bool:
        abort: Any = SimpleNamespace(rid=rid, http_worker_ipc=worker, abort_all=abort_all)
        return held.is_of_another_worker(abort)

    assert is_another_workers("name", "other")
    assert not is_another_workers("name", "one")
    assert not is_another_workers("name1", "other")
    assert not is_another_workers("name", "other", abort_all=True)
    assert not is_another_workers("name", None)
    finished = True
    assert not is_another_workers("name", "other")
