"""Last chunk of an aborted stream, from SGLang's own tokenizer manager."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

from sglang_inflight.extensions.mends.aborted_answers import end_with_an_empty_chunk


def aborted(*, stream: bool, increments: bool) -> dict[str, Any]:
    """Return the last chunk of a request. Two tokens and their text were sent before."""
    manager: Any = object.__new__(TokenizerManager)
    obj = SimpleNamespace(
        stream=stream, return_logprob=True, return_text_in_logprobs=False, token_ids_logprob=None,
        top_logprobs_num=0, lora_path=None,
    )  # fmt: skip
    state = ReqState([], False, asyncio.Event(), cast(Any, obj), APIServerReqTimeStats())
    state.output_ids, state.last_output_offset = [5, 6], 2
    state.output_token_logprobs_val, state.output_token_logprobs_idx = [-1.0, -2.0], [5, 6]
    state.append_text("t5 t6")
    manager.__dict__ |= {
        "rid_to_state": {"r": state},
        "incremental_streaming_output": increments,
        "enable_lora": False,
        "config_value": lambda name: "v0",
    }
    end_with_an_empty_chunk(
        TokenizerManager._handle_abort_req, manager, cast(Any, AbortReq(rid="r"))
    )
    (chunk,) = state.out_list
    return chunk


def test_abort_chunk_repeats_no_sent_tokens() -> None:
    chunk = aborted(stream=True, increments=True)
    assert (chunk["text"], chunk["output_ids"]) == ("", [])
    assert chunk["meta_info"]["output_token_logprobs"] == []
    assert chunk["meta_info"]["completion_tokens"] == 2


@pytest.mark.parametrize(("stream", "increments"), [(False, True), (True, False)])
def test_abort_of_other_requests_has_all_tokens(stream: bool, increments: bool) -> None:
    chunk = aborted(stream=stream, increments=increments)
    assert (chunk["text"], chunk["output_ids"]) == ("t5 t6", [5, 6])
    assert len(chunk["meta_info"]["output_token_logprobs"]) == 2
