"""Abort of a request with output tokens, sent by SGLang's own output streamer."""

from __future__ import annotations

from array import array
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components import output_streamer
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_inflight.scheduler.retraction.aborted_output import (
    finish_with_output,
    has_made_something,
)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    serving = SimpleNamespace(stream_interval=1, weight_version="v0")
    idle = SimpleNamespace(enable_request_time_stats_logging=False)
    alone = SimpleNamespace(dp_rank=None, attn_tp_rank=0)
    monkeypatch.setattr(output_streamer, "get_serving", lambda: serving)
    monkeypatch.setattr(output_streamer, "get_observability", lambda: idle)
    monkeypatch.setattr(output_streamer, "get_parallel", lambda: alone)
    return []


def retracted(*, stream: bool) -> Req:
    """A retracted request with three output tokens, one of them sent."""
    params = SamplingParams(max_new_tokens=9)
    params.normalize(None)
    req = Req("r", "", array("q", [1, 2, 3, 4]), params, stream=stream, return_logprob=True)
    req.output_ids = array("q", [5, 6, 7])
    req.send_token_offset = req.send_output_token_logprobs_offset = 1
    req.logprob.output_token_logprobs_val = [-1.0, -2.0, -3.0]
    req.logprob.output_token_logprobs_idx = [5, 6, 7]
    req.retraction_count, req.is_retracted = 1, True
    return req


def abort(req: Req, sent: list[Any], **fields: Any) -> Any:
    streamer = SchedulerOutputStreamer(
        send_to_detokenizer=cast(Any, SimpleNamespace(send_output=sent.append)),
        tree_cache=cast(Any, None), server_args=cast(Any, SimpleNamespace(enable_lmcache=False)),
        is_generation=True, spec_algorithm=SpeculativeAlgorithm.NONE,
        disaggregation_mode=DisaggregationMode.NULL, enable_hicache_storage=lambda: False,
    )  # fmt: skip
    assert has_made_something(cast(Any, req))
    finish_with_output(cast(Any, streamer), cast(Any, req), cast(Any, AbortReq(rid="r", **fields)))
    (payload,) = sent
    return payload


@pytest.mark.parametrize("stream", [False, True])
def test_abort_output_has_all_unsent_tokens(sent: list[Any], stream: bool) -> None:
    payload = abort(retracted(stream=stream), sent)
    assert [list(ids) for ids in payload.output_ids] == [[6, 7]]
    assert payload.output_token_logprobs_val == [[-2.0, -3.0]]
    assert (payload.prompt_tokens, payload.completion_tokens) == ([4], [3])
    (reason,) = payload.finished_reasons
    assert (reason["type"], reason["message"]) == ("abort", "Abort in waiting queue")
    assert reason["status_code"] is None


def test_abort_output_has_reason_and_status(sent: list[Any]) -> None:
    why = {"type": "abort", "message": "no memory", "status_code": HTTPStatus.SERVICE_UNAVAILABLE}
    payload = abort(retracted(stream=True), sent, finished_reason=why)
    (reason,) = payload.finished_reasons
    assert (reason["message"], reason["status_code"]) == ("no memory", 503)


def test_abort_without_output_is_left_to_sglang() -> None:
    params = SamplingParams(max_new_tokens=9)
    assert not has_made_something(cast(Any, Req("r", "", array("q", [1]), params)))
