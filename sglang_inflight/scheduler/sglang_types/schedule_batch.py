"""A batch: the requests of one step."""

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
    # only in a prefill: numbers of cached and of computed tokens, per request
    prefix_lens: list[int]
    extend_lens: list[int]
    # None if the forward writes no KV
    out_cache_loc: torch.Tensor | None
    forward_mode: ForwardMode
    spec_algorithm: SpeculativeAlgorithm
    enable_overlap: bool
    # only on a prefill server: true once the chunk's KV is cached and may be sent
    prefill_chunk_processed: bool
    # true: add no request before another has ended
    batch_is_full: bool

    def is_empty(self) -> bool: ...
    def filter_batch(self) -> None:
        """Remove ended requests."""


@describes("sglang.srt.managers.scheduler_pp_mixin.PPBatchMetadata")
class PPBatchMetadata(Protocol):
    """``fwd_batch`` is a snapshot of the microbatch at its launch, if it may have changed."""

    fwd_batch: ScheduleBatch | None
