"""A prefill's result, written to the requests by SGLang's patched function."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_inflight.livepatch import load_series

MODULE = "sglang.srt.managers.scheduler_components.batch_result_processor"


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The patched class, in a module of its own."""
    (patched,) = (each for each in load_series().plan().modules if each.name == MODULE)
    module = ModuleType("patched_batch_result_processor")
    # dataclasses look up their module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(patched.text, str(patched.path), "exec"), module.__dict__)
    return module.SchedulerBatchResultProcessor


class Written(Exception):
    """The first request not skipped was given its log probabilities."""


def request(*, is_retracted: bool) -> Any:
    return SimpleNamespace(
        finished=lambda: False, is_retracted=is_retracted, inflight_middle_chunks=0,
        discard_output_reason=None, return_sampling_mask=False, return_logprob=True,
        time_stats=SimpleNamespace(set_prefill_finished_time=lambda: None), beam_group=None,
        output_ids=[], update_finish_state=lambda: None, logprob=SimpleNamespace(),
    )  # fmt: skip


def test_retracted_request_keeps_next_requests_input_logprobs(processor: Any) -> None:
    reqs = [request(is_retracted=True), request(is_retracted=False)]
    lengths = [3, 5]
    wanted: list[tuple[Any, int]] = []

    def give(i: int, req: Any, pt: int, *args: object) -> None:
        wanted.append((req, pt))
        raise Written

    logprobs = SimpleNamespace(
        calculate_num_input_logprobs=lambda req, length, start: length - start,
        add_logprob_return_values=give,
    )
    own = SimpleNamespace(
        is_generation=True,
        token_to_kv_pool_allocator=SimpleNamespace(free_group_begin=lambda: None),
        logprob_result_processor=logprobs,
        snapshot_auxiliary_output_starts=lambda batch, result: None,
        move_logprobs_to_cpu=lambda *, batch, logits_output: None,
        materialize_sampling_mask_output=lambda reqs, logits_output: None,
        _validate_pp_skip_output_comm=lambda batch, result: None,
        _get_prefill_hidden_capture_mode=lambda batch: None,
        _maybe_update_reasoning_tokens=lambda req, token: None,
        _maybe_collect_customized_info=lambda i, req, logits_output: None,
    )
    own._apply_prefill_logprobs = partial(processor._apply_prefill_logprobs, own)
    batch = SimpleNamespace(
        reqs=reqs, return_logprob=True, return_hidden_states=False, decoding_reqs=reqs,
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
    )  # fmt: skip
    result = SimpleNamespace(
        copy_done=None, auxiliary_host_output=None, routed_experts_output=None,
        indexer_topk_output=None, logits_output=SimpleNamespace(customized_info=None),
        next_token_ids=torch.tensor([7, 8]), extend_input_len_per_req=lengths,
        extend_logprob_start_len_per_req=[0, 0],
    )  # fmt: skip
    with pytest.raises(Written):
        processor.process_batch_result_prefill(own, batch, result)
    assert wanted == [(reqs[1], lengths[0])]
