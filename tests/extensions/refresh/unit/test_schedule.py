"""Whatever comes, a step recomputes within its budget, and every request ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_inflight.extensions.refresh import refresh as refresh_module
from sglang_inflight.extensions.refresh.refresh import Refresh, name_age, round_up
from sglang_inflight.scheduler import requests
from sglang_inflight.scheduler.pause.machine import PauseState
from tests.unit.fakes import uncounted

CHUNK = 64
# this module's requests are not SGLang's
record_of: Any = requests.record_of


@dataclass(eq=False)
class Req:
    """A request with as much of SGLang's as the schedule reads."""

    rid: str
    prompt: int
    wanted: int
    tokens: int = 0
    prefix_len: int = 0
    extend_end: int = 0
    retractions: int = 0
    kv: Any = field(default_factory=lambda: SimpleNamespace(holds_kv=False, kv_committed_len=0))

    @property
    def full_untruncated_fill_ids(self) -> range:
        return range(self.seqlen)

    @property
    def seqlen(self) -> int:
        return self.prompt + self.tokens

    @property
    def extend_len(self) -> int:
        return self.extend_end - self.prefix_len

    def finished(self) -> bool:
        return self.tokens >= self.wanted


class Adder:
    """SGLang's ``PrefillAdder`` with chunks, without memory's limits."""

    def __init__(self, refreshes: Any, *, has_prefix_cache: bool) -> None:
        controller = SimpleNamespace(part=lambda kind: refreshes)
        pool = SimpleNamespace(inflight=controller)
        self.tree_cache = SimpleNamespace(disable=not has_prefix_cache, req_to_token_pool=pool)
        self.rem_chunk_tokens = CHUNK
        self.can_run_list: list[Req] = []
        self.new_chunked_req: Req | None = None

    def budget_state(self) -> AddReqResult:
        return AddReqResult.OTHER if self.rem_chunk_tokens <= 0 else AddReqResult.CONTINUE

    def select(self, req: Req) -> Any:
        length = min(req.seqlen - req.prefix_len, self.rem_chunk_tokens)
        return SimpleNamespace(length=length, is_chunked=req.prefix_len + length < req.seqlen)

    def add_one(self, req: Req) -> AddReqResult:
        if self.rem_chunk_tokens <= 0:
            return AddReqResult.OTHER
        us: Any = self
        admission = (
            self.select(req)
            if self.tree_cache.disable
            else refresh_module.refuse_second_chunk(Adder.select, us, req)
        )
        if isinstance(admission, AddReqResult):
            return admission
        if admission.is_chunked:
            # SGLang would forget the first one
            assert not refresh_module.has_chunk(us)
            self.new_chunked_req = req
        self._admit(req, admission.length)
        return self.budget_state()

    def add_chunk(self, req: Req) -> Req | None:
        admission = self.select(req)
        self._admit(req, admission.length)
        return req if admission.is_chunked else None

    def _admit(self, req: Req, length: int) -> None:
        req.extend_end = req.prefix_len + length
        self.rem_chunk_tokens -= length
        self.can_run_list.append(req)


class Server:
    """A scheduler that prefills before it decodes, as SGLang's. A commit puts all KV over."""

    def __init__(self, budget: int | None, *, is_soft: bool, has_prefix_cache: bool = True) -> None:
        self._has_prefix_cache = has_prefix_cache
        self.waiting_queue: list[Req] = []
        self.chunked_req: Req | None = None
        self.page_size = 1
        self.truncation_align_size = None
        self.tree_cache = None
        self.running: list[Req] = []
        self.pause: Any = SimpleNamespace(state=PauseState.RUNNING)
        self.epoch = 0
        self.requests = SimpleNamespace(running=lambda: {*self.running, *self._chunked()})
        self._begun: dict[Req, None] = {}
        us: Any = self
        self.refreshes: Any = Refresh(
            us, us, us.pause, us, uncounted(), tokens=budget, is_soft=is_soft
        )
        # tokens that each step's prefill has recomputed, and tokens decoded with old KV
        self.recomputed: list[int] = []
        self.with_old_kv = 0
        # steps of recomputing alone since the last of decoding, while something could decode
        self.in_a_row = 0

    def _chunked(self) -> list[Req]:
        return [] if self.chunked_req is None else [self.chunked_req]

    # ---- as a Boundary ---------------------------------------------------------------

    def refreshing(self) -> list[Req]:
        return [
            req
            for req in self._begun
            if record_of(req).is_refreshing
            and not req.finished()
            and (req is self.chunked_req or not req.kv.holds_kv)
        ]

    def refresh(self, reqs: list[Req]) -> list[Req]:
        held = [req for req in reqs if req in self.requests.running()]
        for req in held:
            if req is self.chunked_req:
                self.chunked_req = None
            else:
                self.running.remove(req)
            req.prefix_len, req.kv.holds_kv = 0, False
            req.retractions += 1
            record_of(req).is_refreshing = True
            self._begun[req] = None
        self.waiting_queue = [*held, *self.waiting_queue]
        return held

    # ---- steps -----------------------------------------------------------------------

    def commit(self) -> None:
        self.epoch += 1
        over = sorted(self.requests.running(), key=lambda req: (record_of(req).kv_epoch, req.rid))
        self.refresh([*self.refreshes.choose(over)])

    def step(self) -> None:
        self.refreshes.settle()
        defers = self.refreshes.defers_prefill(lambda batch: False, self._batch(self.running))
        batch = None if defers else self._prefill()
        if not defers:
            self.refreshes.note_prefill(SimpleNamespace(batch_to_run=batch))
        if batch is not None:
            alone = all(record_of(req).is_refreshing for req in batch.reqs)
            self.in_a_row = self.in_a_row + 1 if alone and self.running else 0
            for req in batch.reqs:
                req.prefix_len = req.extend_end
                if req.prefix_len == req.seqlen:
                    req.tokens += 1
                    self.running.append(req)
            self.running = [req for req in self.running if not req.finished()]
            return
        self.in_a_row = 0
        for req in self.running:
            req.tokens += 1
            self.with_old_kv += record_of(req).kv_epoch < self.epoch
        self.running = [req for req in self.running if not req.finished()]

    def _batch(self, reqs: list[Req]) -> Any:
        return SimpleNamespace(reqs=reqs, is_empty=lambda: not reqs)

    def _prefill(self) -> Any:
        may_run = self.refreshes.choice()
        adder: Any = Adder(self.refreshes, has_prefix_cache=self._has_prefix_cache)
        if self.chunked_req is not None:
            chunked: Any = self.chunked_req
            self.chunked_req = refresh_module.add_chunk(Adder.add_chunk, adder, chunked)
        shown: list[Any]
        shown = [req for req in self.waiting_queue if may_run is None or may_run(req)]
        for req in shown:
            if adder.budget_state() is AddReqResult.OTHER:
                break
            record_of(req).kv_epoch = self.epoch
            added = refresh_module.add_one(Adder.add_one, adder, req)
            if added is not AddReqResult.CONTINUE:
                break
        self.waiting_queue = [req for req in self.waiting_queue if req not in adder.can_run_list]
        if adder.new_chunked_req is not None:
            assert self.chunked_req is None
            self.chunked_req = adder.new_chunked_req
        for req in adder.can_run_list:
            req.kv.holds_kv = True
        self.recomputed.append(
            sum(req.extend_len for req in adder.can_run_list if record_of(req).is_refreshing)
        )
        return self._batch(adder.can_run_list) if adder.can_run_list else None


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh_module, "count_cached", lambda req, tree_cache: 0)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 200), st.integers(1, 60)),
        st.tuples(st.just("commit"), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 12), st.just(0)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=300)
@given(EVENTS, st.integers(1, 80), st.booleans(), st.booleans())
def test_budget_holds_and_every_request_ends(
    events: list[tuple[str, int, int]], budget: int, is_soft: bool, has_prefix_cache: bool
) -> None:
    server = Server(budget, is_soft=is_soft, has_prefix_cache=has_prefix_cache)
    reqs: list[Req] = []
    for what, first, second in events:
        if what == "come":
            reqs.append(Req(f"{len(reqs):03d}", first, second))
            server.waiting_queue.append(reqs[-1])
        elif what == "commit":
            server.commit()
        else:
            for _ in range(first):
                server.step()
    # each step decodes a token, or prefills at least one
    steps = 2 * sum(req.prompt + 2 * req.wanted for req in reqs) * (1 + len(events))
    while any(not req.finished() for req in reqs) and steps:
        server.step()
        steps -= 1
        assert server.in_a_row <= 1, "no step of decoding between two of recomputing"
    assert [req.rid for req in reqs if not req.finished()] == []
    assert [req.rid for req in reqs if req.tokens != req.wanted] == []
    assert max(server.recomputed, default=0) <= budget
    if not is_soft:
        assert server.with_old_kv == 0


def test_oldest_kv_is_recomputed_first_and_one_request_at_a_time() -> None:
    server = Server(16, is_soft=True)
    reqs = [Req(f"{index}", 32, 1000) for index in range(3)]
    for req in (reqs[2], reqs[0], reqs[1]):
        server.waiting_queue.append(req)
        while not req.tokens:
            server.step()
        server.epoch += 1
    server.commit()
    order = []
    for _ in range(200):
        before = {req: req.retractions for req in reqs}
        server.step()
        order += [req for req in reqs if req.retractions > before[req]]
        assert len(server.refreshing()) <= 1
    assert order == [reqs[2], reqs[0], reqs[1]]


def test_without_a_budget_all_are_recomputed_at_once() -> None:
    server = Server(None, is_soft=False)
    server.waiting_queue = [Req(f"{index}", 10, 100) for index in range(5)]
    for _ in range(3):
        server.step()
    server.commit()
    server.step()
    assert server.recomputed[-1] > 50
    assert not server.waiting_queue


def test_frozen_loop_retracts_nobody() -> None:
    server = Server(16, is_soft=True)
    server.waiting_queue = [Req("a", 10, 100)]
    server.step()
    server.pause.state = PauseState.FROZEN
    server.commit()
    server.refreshes.settle()
    assert not server.refreshing()
    server.pause.state = PauseState.RUNNING
    server.refreshes.settle()
    assert [req.rid for req in server.refreshing()] == ["a"]


def test_budget_is_a_multiple_of_the_least_cut() -> None:
    assert [round_up(tokens, 16) for tokens in (1, 16, 17)] == [16, 16, 32]


def test_ages_have_labels() -> None:
    assert [name_age(age) for age in (0, 1, 4, 5, 8, 9, 16, 17)] == [
        "0", "1", "4", "5-8", "5-8", "9-16", "9-16", "17+",
    ]  # fmt: skip


def test_request_retracted_meanwhile_is_not_recomputed_twice() -> None:
    server = Server(16, is_soft=True)
    server.waiting_queue = [Req("a", 40, 100), Req("b", 40, 100)]
    for _ in range(4):
        server.step()
    first, second = sorted(server.running, key=lambda req: req.rid)
    server.commit()
    # memory takes the second one's KV before its turn
    server.running.remove(second)
    second.prefix_len, second.kv.holds_kv = 0, False
    server.waiting_queue.append(second)
    for _ in range(60):
        server.step()
    assert (first.retractions, second.retractions) == (1, 0)
