"""Types of SGLang's objects with our attributes. Only type checkers import this module."""

from __future__ import annotations

from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.mem_cache.l2_transfer import L2TransferEngine
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.session.streaming_session import StreamingSession

from sglang_inflight.scheduler.controller import Controller
from sglang_inflight.scheduler.update.reservation import ReservingScheduler


class PatchedReqToTokenPool(ReqToTokenPool):
    inflight: Controller


class PatchedRadixCache(UnifiedRadixCache):
    req_to_token_pool: PatchedReqToTokenPool


class PatchedStreamingSession(StreamingSession):
    cache: PatchedRadixCache


class PatchedTransferEngine(L2TransferEngine):
    inflight: Controller


class PatchedResultProcessor(SchedulerBatchResultProcessor):
    req_to_token_pool: PatchedReqToTokenPool


class PatchedPreallocQueue(DecodePreallocQueue):
    scheduler: PatchedScheduler


class PatchedOutputStreamer(SchedulerOutputStreamer):
    inflight: Controller


class PatchedSender(SenderWrapper):
    """The sender to the tokenizer. The sender to the detokenizer has no controller."""

    inflight: Controller


class PatchedScheduler(ReservingScheduler):
    inflight: Controller
    output_streamer: PatchedOutputStreamer
    req_to_token_pool: PatchedReqToTokenPool


class PatchedTransferQueue(DecodeTransferQueue):
    scheduler: PatchedScheduler
