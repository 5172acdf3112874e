"""Protocols of SGLang's objects with our attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sglang_inflight.scheduler.sglang_types.pools import (
    L2TransferEngine,
    ReqToTokenPool,
    StreamingSession,
    UnifiedRadixCache,
)
from sglang_inflight.scheduler.sglang_types.scheduler import (
    DecodePreallocQueue,
    DecodeTransferQueue,
    SchedulerBatchResultProcessor,
    SchedulerOutputStreamer,
    SenderWrapper,
)
from sglang_inflight.scheduler.update.reservation import ReservingScheduler

if TYPE_CHECKING:
    from sglang_inflight.scheduler.controller import Controller


class PatchedReqToTokenPool(ReqToTokenPool, Protocol):
    inflight: Controller


class PatchedRadixCache(UnifiedRadixCache, Protocol):
    req_to_token_pool: PatchedReqToTokenPool


class PatchedStreamingSession(StreamingSession, Protocol):
    cache: PatchedRadixCache


class PatchedTransferEngine(L2TransferEngine, Protocol):
    inflight: Controller


class PatchedResultProcessor(SchedulerBatchResultProcessor, Protocol):
    req_to_token_pool: PatchedReqToTokenPool


class PatchedPreallocQueue(DecodePreallocQueue, Protocol):
    scheduler: PatchedScheduler


class PatchedOutputStreamer(SchedulerOutputStreamer, Protocol):
    inflight: Controller


class PatchedSender(SenderWrapper, Protocol):
    """The sender to the tokenizer. The sender to the detokenizer has no controller."""

    inflight: Controller


class PatchedScheduler(ReservingScheduler, Protocol):
    inflight: Controller
    output_streamer: PatchedOutputStreamer
    req_to_token_pool: PatchedReqToTokenPool


class PatchedTransferQueue(DecodeTransferQueue, Protocol):
    scheduler: PatchedScheduler
