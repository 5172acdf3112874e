"""Requests with one name from several tokenizer workers."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.detokenizer_manager import DetokenizerManager, LimitedCapacityDict
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    BatchTokenizedGenerateReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_inflight.extensions.workers import request_names
from sglang_inflight.extensions.workers.hooks import separate_workers
from sglang_inflight.extensions.workers.request_names import RequestNames


def request(rid: str, worker: str) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        rid=rid,
        http_worker_ipc=worker,
        input_text=None,
        input_ids=array("q", [1]),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )


class Rank:
    """The rank that takes messages in. Its requests run until the test ends them."""

    def __init__(self, workers: int = 2) -> None:
        self.live: dict[str, Any] = {}
        # worker and request
        self.refused: list[tuple[str, str]] = []
        self.names = RequestNames()
        sender = SimpleNamespace(socket=object(), send_output=self._send)
        scheduler: Any = SimpleNamespace(
            ipc_channels=SimpleNamespace(send_to_tokenizer=sender), _deferred_input_requests=[]
        )
        requests: Any = SimpleNamespace(live=lambda: self.live.values())
        self.names.bind(scheduler, requests)

    def _send(self, output: AbortReq, recv_obj: Any) -> None:
        assert output.finished_reason is not None
        assert output.finished_reason["status_code"] == 400
        self.refused.append((recv_obj.http_worker_ipc, output.rid or ""))

    def take(self, *messages: Any) -> list[Any]:
        passed = self.names.take(lambda: [*messages])
        assert passed is not None
        for each in passed:
            if isinstance(each, TokenizedGenerateReqInput):
                self.begin(each)
        return passed

    def begin(self, each: Any) -> None:
        self.live[each.rid] = SimpleNamespace(rid=each.rid, finished=lambda: False)


@pytest.fixture(autouse=True)
def several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = SimpleNamespace(tokenizer_worker_num=2)
    monkeypatch.setattr(request_names, "get_serving", lambda: serving)


def test_request_name_is_free_after_its_request_ends() -> None:
    rank = Rank()
    first, second = request("x", "one"), request("x", "other")
    assert rank.take(first, request("y", "other")) != []
    assert rank.take(second) == []
    assert rank.refused == [("other", "x")]
    del rank.live["x"]
    assert rank.take(second) == [second]


def test_second_request_of_a_name_in_one_batch_is_refused() -> None:
    rank = Rank()
    first, second = request("x", "one"), request("x", "other")
    assert rank.take(first, second) == [first]
    assert rank.refused == [("other", "x")]


def test_duplicate_in_batch_is_refused_alone() -> None:
    rank = Rank()
    rank.take(request("x", "one"))
    fresh = request("z", "other")
    batch = BatchTokenizedGenerateReqInput(batch=[request("x", "other"), fresh])
    (passed,) = rank.take(batch)
    assert passed.batch == [fresh]
    assert rank.refused == [("other", "x")]
    rank.begin(fresh)
    assert rank.take(BatchTokenizedGenerateReqInput(batch=[request("z", "one")])) == []


def test_abort_by_another_worker_is_passed_on() -> None:
    """The scheduler of each replica decides on the abort."""
    rank = Rank()
    rank.take(request("x", "one"))
    abort = AbortReq(rid="x", http_worker_ipc="other")
    assert rank.take(abort) == [abort]


def test_names_of_ended_requests_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_names, "FULL", 4)
    rank = Rank()
    rank.names._full = 4
    rank.take(request("stays", "one"))
    for index in range(40):
        rank.take(request(str(index), "one"))
        del rank.live[str(index)]
    assert len(rank.names._names) <= 5
    assert rank.take(request("stays", "other")) == []


# ---- the detokenizer -----------------------------------------------------------------------


def output(*rows: tuple[str, list[int], bool]) -> BatchTokenIDOutput:
    """Build a step's output for requests named x: worker, tokens, and whether they are the last."""
    n = len(rows)
    fields: dict[str, Any] = {
        field: [None] * n
        for field in BatchTokenIDOutput.__struct_fields__
        if field not in ("rids", "http_worker_ipcs")
    }
    fields |= {
        "finished_reasons": [{"type": "length"} if last else None for _, _, last in rows],
        "decoded_texts": [""] * n,
        "decode_ids": [tokens for _, tokens, _ in rows],
        "read_offsets": [0] * n,
        "skip_special_tokens": [True] * n,
        "spaces_between_special_tokens": [True] * n,
        "no_stop_trim": [False] * n,
        "routed_experts": None,
        "indexer_topk": None,
        "beam_search_output": None,
    }
    return BatchTokenIDOutput(
        rids=["x"] * n, http_worker_ipcs=[worker for worker, _, _ in rows], **fields
    )


def test_detokenizer_separates_workers_with_same_name() -> None:
    """Two replicas each have a request of that name."""
    detokenizer = DetokenizerManager.__new__(DetokenizerManager)
    detokenizer.decode_status = LimitedCapacityDict(capacity=8)
    detokenizer.disable_tokenizer_batch_decode = True
    detokenizer.vocab_size = None
    detokenizer.tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids)))

    def step(*rows: tuple[str, list[int], bool]) -> list[str]:
        made = separate_workers(
            DetokenizerManager.handle_batch_token_id_out, detokenizer, output(*rows)
        )
        assert made.rids == ["x"] * len(rows)
        assert made.http_worker_ipcs == [worker for worker, _, _ in rows]
        texts: list[str] = made.output_strs
        return texts

    assert step(("one", [97], False), ("other", [98], False)) == ["a", "b"]
    assert step(("one", [99], True), ("other", [100], False)) == ["c", "d"]
    assert step(("other", [101], True)) == ["e"]
    assert not detokenizer.decode_status


def test_abort_spares_another_workers_request() -> None:
    """Another worker may reuse the name when this worker's request ended or was refused."""
    finished = False
    rank = Rank()
    rank.live["name"] = SimpleNamespace(
        rid="name", http_worker_ipc="one", finished=lambda: finished
    )

    def is_passed_on(rid: str, worker: str | None, *, abort_all: bool = False) -> bool:
        abort: Any = SimpleNamespace(rid=rid, http_worker_ipc=worker, abort_all=abort_all)
        passed_on: list[AbortReq] = []
        rank.names.abort_own(passed_on.append, abort)
        return bool(passed_on)

    assert not is_passed_on("name", "other")
    assert is_passed_on("name", "one")
    assert is_passed_on("name1", "other")
    assert is_passed_on("name", "other", abort_all=True)
    assert is_passed_on("name", None)
    finished = True
    assert is_passed_on("name", "other")
