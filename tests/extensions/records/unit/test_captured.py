"""Rows that a request keeps through retractions, read by SGLang's own capturer."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.state_capturer.base import BaseTopkCapturer

from sglang_inflight.extensions.records import captured
from sglang_inflight.extensions.records.captured import CapturedRows, forget

PROMPT, SLOTS = 4, 16


class Capturer(BaseTopkCapturer):
    """SGLang's capturer without its memory: a row holds its slot, and the run that wrote it."""

    def __init__(self) -> None:
        self.host_cache: Any = SimpleNamespace(buffer=torch.zeros(SLOTS, 1, 2, dtype=torch.int32))

    def write(self, run: int) -> None:
        self.host_cache.buffer[:, 0, 0] = torch.arange(SLOTS)
        self.host_cache.buffer[:, 0, 1] = run


class Request:
    """A request in position order of its slots, and what a scheduler does with it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        start: int = 0,
        mode: DisaggregationMode = DisaggregationMode.NULL,
        records: str | None = None,
    ) -> None:
        self.capturer = Capturer()
        monkeypatch.setattr(captured, "get_global_experts_capturer", lambda: self.capturer)
        monkeypatch.setattr(captured, "get_global_indexer_capturer", lambda: None)
        pool = SimpleNamespace(req_to_token=torch.arange(SLOTS).unsqueeze(0))
        scheduler: Any = SimpleNamespace(req_to_token_pool=pool, disaggregation_mode=mode)
        self.rows = CapturedRows(scheduler)
        self.req = Req(
            "r",
            "",
            array("q", range(PROMPT)),
            SamplingParams(custom_params=None if records is None else {"records": records}),
            return_routed_experts=True,
            routed_experts_start_len=start,
        )
        self.req.kv.req_pool_idx = 0

    def run(self, run: int, tokens: int) -> None:
        """Compute all positions, and make ``tokens``."""
        self.capturer.write(run)
        for index in range(tokens):
            self.req.output_ids.append(7)
            if index == 0:
                self.rows.keep_last(self.req)
        self.req.kv.kv_committed_len = PROMPT + len(self.req.output_ids) - 1

    def retract(self) -> None:
        self.rows.keep(self.req)
        self.req.kv.kv_committed_len = 0

    def end(self, *, with_kv: bool) -> list[tuple[int, int]]:
        """Return the position and the run of each row."""
        if with_kv:
            self.req.routed_experts = self.capturer.get_topk(
                0,
                PROMPT + len(self.req.output_ids),
                self.rows._scheduler.req_to_token_pool,
                self.req.routed_experts_start_len,
            )
        self.req.finished_reason = FINISH_LENGTH(len(self.req.output_ids))
        self.rows.put_back(self.req)
        rows = self.req.routed_experts
        return [] if rows is None else [(int(p), int(run)) for p, run in rows[:, 0]]


def by_runs(*positions_of_runs: int, start: int = 0) -> list[tuple[int, int]]:
    """Return rows where run ``i`` wrote the next ``positions_of_runs[i]`` positions."""
    runs = [run for run, count in enumerate(positions_of_runs, 1) for _ in range(count)]
    return list(enumerate(runs))[start:]


@pytest.mark.parametrize("start", [0, 2, PROMPT])
@pytest.mark.parametrize("with_kv", [True, False])
def test_each_run_has_the_rows_of_its_own_tokens(
    monkeypatch: pytest.MonkeyPatch, start: int, with_kv: bool
) -> None:
    request = Request(monkeypatch, start=start)
    request.run(1, tokens=2)
    request.retract()
    request.run(2, tokens=1)
    request.retract()
    request.run(3, tokens=3)
    if not with_kv:
        request.retract()
    # the first run: the prompt, and the first token
    assert request.end(with_kv=with_kv) == by_runs(PROMPT + 1, 1, 3, start=start)


def test_prefill_retracted_between_its_chunks_changes_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = Request(monkeypatch)
    request.run(1, tokens=3)
    request.retract()
    request.capturer.write(2)
    request.rows.keep_last(request.req)
    request.req.kv.kv_committed_len = 2
    request.retract()
    assert request.end(with_kv=False) == by_runs(PROMPT + 2)


def test_first_tokens_row_is_read_before_its_slot_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = Request(monkeypatch)
    request.run(1, tokens=1)
    # rows of the slots of an older prefix
    request.capturer.write(0)
    assert request.end(with_kv=True) == [*((p, 0) for p in range(PROMPT - 1)), (PROMPT - 1, 1)]


def test_request_without_a_token_keeps_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(monkeypatch)
    request.capturer.write(1)
    request.req.kv.kv_committed_len = PROMPT
    request.retract()
    request.run(2, tokens=1)
    assert request.end(with_kv=True) == [(p, 2) for p in range(PROMPT)]


def test_request_that_begins_anew_has_no_earlier_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(monkeypatch)
    request.run(1, tokens=3)
    request.retract()
    del request.req.output_ids[:]
    forget(request.req)
    request.run(2, tokens=2)
    assert request.end(with_kv=True) == [(p, 2) for p in range(PROMPT + 1)]


@pytest.mark.parametrize("with_kv", [True, False])
def test_recomputed_rows_are_those_of_the_last_run(
    monkeypatch: pytest.MonkeyPatch, with_kv: bool
) -> None:
    request = Request(monkeypatch, records="recomputed")
    request.run(1, tokens=2)
    request.retract()
    request.run(2, tokens=2)
    if not with_kv:
        request.retract()
        # retracted again, in the middle of the next prefill
        request.capturer.write(3)
        request.req.kv.kv_committed_len = 3
        request.retract()
    assert request.end(with_kv=with_kv) == [(p, 2) for p in range(PROMPT + 3)]


def test_decode_server_does_not_know_the_prompts_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(monkeypatch, start=1, mode=DisaggregationMode.DECODE)
    request.run(1, tokens=3)
    assert request.end(with_kv=True) == [(-1, -1)] * (PROMPT - 1) + [(PROMPT, 1), (PROMPT + 1, 1)]
