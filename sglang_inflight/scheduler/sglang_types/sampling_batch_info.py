"""Sampling parameters of a batch's requests, in tensors."""

from __future__ import annotations

from typing import Any, Protocol

from sglang_inflight.sglang_types.describes import describes


@describes("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo")
class SamplingBatchInfo(Protocol):
    # None in a step without a grammar
    grammar_mask: Any
