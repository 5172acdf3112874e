"""The census of a scheduler's requests, in each of its queues."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_inflight.scheduler.requests import Requests
from tests.unit.fakes import QueuedRequest, full_scheduler


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    return full_scheduler(monkeypatch)


@pytest.fixture
def decode(scheduler: Any) -> Any:
    """An idle decode server."""
    scheduler._collect_inflight_batches = list
    scheduler.collect_inflight_reqs = set
    scheduler.cur_batch_for_debug = scheduler.chunked_req = scheduler.hisparse_coordinator = None
    scheduler.result_queue, scheduler.waiting_queue = [], []
    scheduler.grammar_manager.grammar_queue = []
    scheduler.dllm_manager.waiting_queue = []
    scheduler.disaggregation_mode = DisaggregationMode.DECODE
    scheduler.disagg_decode_prealloc_queue = SimpleNamespace(
        queue=[], retracted_queue=[], held_rebootstrap_reqs=[]
    )
    scheduler.disagg_decode_transfer_queue = SimpleNamespace(
        queue=[], has_pending_deferred_releases=lambda: False
    )
    return scheduler


def test_live_requests_finds_every_queue(scheduler: Any) -> None:
    live: set[Any] = set(Requests(scheduler).live())
    assert live == {
        "running",
        "current",
        "launched",
        "waiting",
        "waiting for its grammar",
        "between two diffusions",
        "chunked",
        "backed up by HiSparse",
    }


def test_live_requests_of_an_idle_scheduler_is_empty(scheduler: Any) -> None:
    scheduler._collect_inflight_batches = list
    scheduler.cur_batch_for_debug = scheduler.chunked_req = scheduler.hisparse_coordinator = None
    scheduler.result_queue, scheduler.waiting_queue = [], []
    scheduler.grammar_manager.grammar_queue = []
    scheduler.dllm_manager.waiting_queue = []
    assert Requests(scheduler).live() == set()


def test_live_requests_finds_disaggregation_queues(scheduler: Any) -> None:
    scheduler.disaggregation_mode = DisaggregationMode.DECODE
    scheduler.disagg_decode_prealloc_queue = SimpleNamespace(
        queue=[SimpleNamespace(req="asked for")],
        retracted_queue=["backed up"],
        held_rebootstrap_reqs=["to be asked for again"],
    )
    scheduler.disagg_decode_transfer_queue = SimpleNamespace(queue=[SimpleNamespace(req="coming")])
    live: set[Any] = set(Requests(scheduler).live())
    assert {"asked for", "backed up", "to be asked for again", "coming"} <= live


def test_begun_requests_on_a_decode_server_have_kv(decode: Any) -> None:
    """Every request with KV counts, wherever the KV is."""
    transferred, coming, driven_out, asked_for = (
        QueuedRequest(row=1),
        QueuedRequest(row=2),
        *_without_kv(2),
    )
    decode.waiting_queue = [transferred]
    decode.disagg_decode_transfer_queue.queue = [SimpleNamespace(req=coming)]
    decode.disagg_decode_prealloc_queue.queue = [SimpleNamespace(req=asked_for)]
    decode.disagg_decode_prealloc_queue.retracted_queue = [driven_out]
    there = Requests(decode)
    begun: set[Any] = set(there.begun())
    assert begun == {transferred, coming, driven_out}
    # a request in transfer is not here yet, so it does not wait here
    waiting: list[Any] = [transferred, asked_for, driven_out]
    assert there.waiting() == waiting


def test_recompute_is_refused_during_kv_transfers(decode: Any) -> None:
    """Such a request has no row, and its server's cache is not flushed meanwhile."""
    there = Requests(decode)
    assert there.why_not_recomputed() is None
    with_a_row = QueuedRequest(row=1)
    decode.disagg_decode_transfer_queue.queue = [
        SimpleNamespace(req=req) for req in (with_a_row, *_without_kv(1))
    ]
    assert "2 requests have KV" in (there.why_not_recomputed() or "")


def test_requests_without_kv_are_found_on_both_servers() -> None:
    waiting: Any = SimpleNamespace(
        waiting_queue=["has its KV, or will"],
        grammar_manager=SimpleNamespace(grammar_queue=["grammar"]),
        disaggregation_mode=DisaggregationMode.PREFILL,
        disagg_prefill_bootstrap_queue=SimpleNamespace(queue=["met no decode server yet"]),
        disagg_decode_prealloc_queue=SimpleNamespace(
            queue=[SimpleNamespace(req="asked for")], held_rebootstrap_reqs=["retracted"]
        ),
    )
    said: list[Any] = list(Requests(waiting).without_kv())
    assert said == ["has its KV, or will", "grammar", "met no decode server yet"]
    waiting.disaggregation_mode = DisaggregationMode.DECODE
    said = list(Requests(waiting).without_kv())
    assert said == ["asked for", "retracted", "grammar"]


def _without_kv(n: int) -> list[QueuedRequest]:
    """Return ``n`` requests without KV on this device."""
    return [QueuedRequest() for _ in range(n)]
