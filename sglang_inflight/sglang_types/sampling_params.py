"""How a request wants its tokens."""

from __future__ import annotations

from typing import Any, Protocol

from sglang_inflight.sglang_types.describes import describes


@describes("sglang.srt.sampling.sampling_params.SamplingParams")
class SamplingParams(Protocol):
    # upstream's place for what it does not know; a dict, unless a client sent something else
    custom_params: Any
    stop_token_ids: set[int] | None
    min_new_tokens: int
    top_k: int
    repetition_penalty: float
    logit_bias: dict[str, float] | None
