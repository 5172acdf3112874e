"""How the requests of a batch want their tokens, put together."""

from __future__ import annotations

from typing import Any, Protocol

from sglang_inflight.sglang_types.describes import describes


@describes("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo")
class SamplingBatchInfo(Protocol):
    # None in a step in which no request has a grammar
    grammar_mask: Any
