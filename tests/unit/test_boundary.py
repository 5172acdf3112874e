"""Retraction and abort of a scheduler's requests, in each of its queues."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_inflight.extensions.contracts.on_rank import Contracts
from sglang_inflight.scheduler import boundary
from sglang_inflight.vocabulary.labels import VersionLabel
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


class Waiting(QueuedRequest):
    """A queued request whose contract an ``exact_weight_version`` of v0 is."""

    def __init__(self, rid: str) -> None:
        super().__init__()
        self.rid = rid
        self.kv.holds_mamba, self.kv.retraction_backup = False, None
        self.sampling_params = SimpleNamespace(custom_params={"exact_weight_version": "v0"})
        self.output_ids: list[int] = []
        self.pd_rebootstrap_forced_output_id = self.to_finish = self.grammar = None
        self.return_logprob = False
        self.lora_id = None
        self.finished_reason: Any = None
        self.time_stats = SimpleNamespace(set_completion_time=lambda: None)

    def update_finish_state(self) -> None:
        self.finished_reason, self.to_finish = self.to_finish, None


class Compiling:
    """A grammar that is being compiled."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Scanned(list[Any]):
    """A queue that counts how often it is looked through."""

    scans = 0

    def __iter__(self) -> Iterator[Any]:
        Scanned.scans += 1
        return super().__iter__()

    def __contains__(self, item: object) -> bool:
        Scanned.scans += 1
        return super().__contains__(item)

    def remove(self, item: Any) -> None:
        Scanned.scans += 1
        super().remove(item)

    def pop(self, *at: Any) -> Any:
        Scanned.scans += 1
        return super().pop(*at)


class ScannedScheduler:
    """A scheduler whose queues stay ``Scanned`` when they are replaced."""

    def __init__(self, waiting: int, without_grammar: int) -> None:
        self.grammar_manager = ScannedGrammars()
        self.waiting_queue = [Waiting(f"step{n}") for n in range(waiting)]
        compiling = [Waiting(f"regex{n}") for n in range(without_grammar)]
        for req in compiling:
            req.grammar = Compiling()  # type: ignore[assignment]
        self.grammar_manager.grammar_queue = compiling
        self.disaggregation_mode = DisaggregationMode.NULL
        self.chunked_req = None
        self.released: list[Any] = []
        self._release_aborted_request = self.released.append
        self.sent: list[list[Any]] = []
        self.output_streamer = SimpleNamespace(
            stream_output=lambda reqs, with_logprobs: self.sent.append(reqs)
        )

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, Scanned(value) if name == "waiting_queue" else value)


class ScannedGrammars:
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, Scanned(value))


def break_contracts(scheduler: Any) -> boundary.Boundary:
    """Check the contracts of all queued requests, with v1 served."""
    metrics: Any = SimpleNamespace(counter=lambda name, help: SimpleNamespace(inc=lambda _=1: None))
    served: Any = SimpleNamespace(label=VersionLabel(1, "v1"))
    adapters: Any = SimpleNamespace(of=lambda req: None)
    there = boundary.Boundary(scheduler, metrics)
    Contracts(scheduler, there, served, adapters, metrics).check_waiting()
    return there


@pytest.mark.usefixtures("scheduler")
def test_commit_looks_through_the_queues_no_oftener_if_more_contracts_break() -> None:
    scans = []
    for many in (3, boundary.AT_ONCE // 2):
        scheduler: Any = ScannedScheduler(many, many)
        Scanned.scans = 0
        break_contracts(scheduler)
        scans.append(Scanned.scans)
        assert (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue) == ([], [])
        # all outputs in one message
        assert [len(sent) for sent in scheduler.sent] == [2 * many]
    assert scans[0] == scans[1]


@pytest.mark.usefixtures("scheduler")
def test_commit_ends_no_more_requests_at_once_if_more_contracts_break() -> None:
    """The others end between later steps, and no step takes them."""
    there: Any = ScannedScheduler(2 * boundary.AT_ONCE, boundary.AT_ONCE)
    everyone = [*there.waiting_queue, *there.grammar_manager.grammar_queue]
    aborted = there.waiting_queue[boundary.AT_ONCE]
    held = break_contracts(there)
    assert [len(sent) for sent in there.sent] == [boundary.AT_ONCE]
    assert [req for req in everyone if held.is_ending(req)] == everyone[boundary.AT_ONCE :]
    # a caller's abort takes one from its queue
    there.waiting_queue.remove(aborted)
    while held.are_ending:
        held.end_some()
    assert [req for sent in there.sent for req in sent] == [r for r in everyone if r != aborted]
    assert max(len(sent) for sent in there.sent) == boundary.AT_ONCE


@pytest.mark.usefixtures("scheduler")
def test_commit_spares_a_request_whose_id_begins_with_a_broken_ones() -> None:
    scheduler: Any = ScannedScheduler(11, 0)
    broken, *_, kept = scheduler.waiting_queue
    for req in scheduler.waiting_queue:
        if req is not broken:
            req.sampling_params.custom_params = None
    assert (broken.rid, kept.rid) == ("step0", "step10")
    broken.rid = "step1"
    break_contracts(scheduler)
    assert broken.finished_reason.status_code == 503
    assert kept in scheduler.waiting_queue
    assert scheduler.sent == [[broken]]


@pytest.mark.usefixtures("scheduler")
def test_request_without_a_compiled_grammar_ends_at_once() -> None:
    """No batch would come for it: its version is lost, so nothing moves it out of the queue."""
    there: Any = ScannedScheduler(1, 2)
    (waiting,) = there.waiting_queue
    ending, other = there.grammar_manager.grammar_queue
    running: Any = Waiting("running")
    boundary.Boundary(there, cast(Any, None)).end(
        {req: FINISH_ABORT("lost", 503) for req in (ending, waiting, running)}
    )
    assert there.grammar_manager.grammar_queue == [other]
    assert there.waiting_queue == []
    assert (ending.grammar.is_cancelled, other.grammar.is_cancelled) == (True, False)
    assert there.released == [waiting, ending]
    assert there.sent == [[waiting, ending]]
    # at its next result
    assert running.finished_reason is None
    assert running.to_finish is not None


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
