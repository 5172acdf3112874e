"""A request's sampling parameters."""

from __future__ import annotations

from typing import Any, Protocol

from sglang_inflight.sglang_types.describes import describes


@describes("sglang.srt.sampling.sampling_params.SamplingParams")
class SamplingParams(Protocol):
    # SGLang passes unknown parameters here; a dict, unless a client sent another type
    custom_params: Any
    stop_token_ids: set[int] | None
    min_new_tokens: int
    top_k: int
    repetition_penalty: float
    logit_bias: dict[str, float] | None
