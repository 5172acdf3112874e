"""KV kept by streaming sessions is freed at a fence, unless a turn runs on it."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import StreamingSession

from sglang_inflight.scheduler import boundary, requests
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.scheduler.retraction.session_turns import end_turns_of_aborted
from sglang_inflight.scheduler.versions.kv_ages import KVAges
from sglang_inflight.vocabulary.kept_kv import FENCE


class Scheduler:
    """SGLang's own sessions, on a cache recording the freed slots."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        tree_cache: Any = SimpleNamespace(
            page_size=1, req_to_token_pool=SimpleNamespace(free=self.free),
            free_kv_row=lambda kv, spans: None, unlock=lambda lock: None,
        )  # fmt: skip
        self.tree_cache = tree_cache
        self.sessions = StreamingSession(tree_cache)
        self.tree_cache.session_records = lambda: {
            name: slot.kv for name, slot in self.sessions.slots.items()
        }
        self.tree_cache.release_session = self.sessions.release_session
        self.running: set[Req] = set()
        self.waiting_queue: list[Req] = []
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.dllm_manager = SimpleNamespace(waiting_queue=[])
        self.cur_batch_for_debug = self.chunked_req = self.hisparse_coordinator = None
        self.disaggregation_mode = DisaggregationMode.NULL
        self.result_queue: list[Any] = []

    def _collect_inflight_batches(self) -> list[Any]:
        return [SimpleNamespace(reqs=list(self.running))]

    def collect_inflight_reqs(self) -> set[Req]:
        return self.running

    def free(self, owner: Any) -> None:
        self.freed.append(owner.kv.req_pool_idx)
        owner.kv.req_pool_idx = None


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    for module in (boundary, requests):
        monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(pp_size=1))
    return Scheduler()


def turn(scheduler: Scheduler, row: int) -> Req:
    """Return a turn of a new session, using the session's KV."""
    session = Session(1, str(row), streaming=True)
    req = Req(
        f"r{row}", "", array("q", [1, 2, 3]), SamplingParams(max_new_tokens=4), session=session
    )
    req.kv.req_pool_idx = row
    scheduler.sessions.take(req)
    return req


def test_fence_frees_sessions_without_a_running_turn(scheduler: Scheduler) -> None:
    running, ended, waiting = (turn(scheduler, row) for row in range(3))
    scheduler.running = {running}
    ended.detach_kv()
    # the waiting turn was matched, and there was no room for it
    scheduler.waiting_queue = [waiting]
    any_scheduler, metrics = cast(Any, scheduler), cast(Any, None)
    KVAges(Boundary(any_scheduler, metrics)).begin(FENCE, 1)
    assert scheduler.freed == [1, 2]
    assert not waiting.kv.holds_kv
    assert scheduler.sessions.borrowed_slot(waiting) is None
    assert scheduler.sessions.borrowed_slot(running) is not None
    assert record_of(running).is_fenced_off
    assert not record_of(waiting).is_fenced_off


def test_turn_ended_for_memory_unblocks_its_session(scheduler: Scheduler) -> None:
    """SGLang's retraction returns the requests it gives up."""
    retracted, given_up = turn(scheduler, 0), turn(scheduler, 1)
    for req in (retracted, given_up):
        assert req.session is not None
        req.session._inflight = True
    without_session = Req("plain", "", array("q", [1]), SamplingParams(max_new_tokens=1))
    end_turns_of_aborted(cast(Any, ([retracted], 0.0, [given_up, without_session])))
    assert retracted.session is not None
    assert retracted.session._inflight
    assert given_up.session is not None
    assert not given_up.session._inflight
