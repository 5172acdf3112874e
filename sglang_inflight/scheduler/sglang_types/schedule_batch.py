"""Requests that make a step together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sglang_inflight.scheduler.sglang_types.req import Req
from sglang_inflight.sglang_types.describes import describes

if TYPE_CHECKING:
    import torch


@describes("sglang.srt.speculative.spec_info.SpeculativeAlgorithm")
class SpeculativeAlgorithm(Protocol):
    def is_none(self) -> bool: ...


@describes("sglang.srt.model_executor.forward_batch_info.ForwardMode")
class ForwardMode(Protocol):
    def is_extend(self) -> bool: ...


@describes("sglang.srt.managers.schedule_batch.ScheduleBatch")
class ScheduleBatch(Protocol):
    reqs: list[Req]
    # of a prefill alone: how many tokens of each request were cached, and are computed
    prefix_lens: list[int]
    extend_lens: list[int]
    # None where the forward writes no KV
    out_cache_loc: torch.Tensor | None
    forward_mode: ForwardMode
    spec_algorithm: SpeculativeAlgorithm
    enable_overlap: bool
    # of a prefill server alone: what its chunked request was given is cached, and may be sent
    prefill_chunk_processed: bool
    # no request is added to it before one has ended
    batch_is_full: bool

    def is_empty(self) -> bool: ...
    def filter_batch(self) -> None:
        """Without requests that have ended."""


@describes("sglang.srt.managers.scheduler_pp_mixin.PPBatchMetadata")
class PPBatchMetadata(Protocol):
    """``fwd_batch`` is the microbatch as it was launched, where it may have changed since."""

    fwd_batch: ScheduleBatch | None
