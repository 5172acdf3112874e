"""SGLang's objects with ours on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sglang_inflight.scheduler.upstream.ipc_channels import SenderWrapper
from sglang_inflight.scheduler.upstream.output_streamer import SchedulerOutputStreamer
from sglang_inflight.scheduler.upstream.pools import (
    L2TransferEngine,
    ReqToTokenPool,
    StreamingSession,
    UnifiedRadixCache,
)
from sglang_inflight.scheduler.upstream.queues import DecodePreallocQueue, DecodeTransferQueue
from sglang_inflight.scheduler.upstream.result_processor import SchedulerBatchResultProcessor
from sglang_inflight.scheduler.upstream.scheduler import Scheduler

if TYPE_CHECKING:
    from sglang_inflight.scheduler.controller import Controller
    from sglang_inflight.scheduler.update.reservation import Reservation


class ReservingScheduler(Scheduler, Protocol):
    """One that has its models, and nothing else of ours yet."""

    inflight_reservation: Reservation | None


class AdoptedReqToTokenPool(ReqToTokenPool, Protocol):
    inflight: Controller


class AdoptedRadixCache(UnifiedRadixCache, Protocol):
    req_to_token_pool: AdoptedReqToTokenPool


class AdoptedStreamingSession(StreamingSession, Protocol):
    cache: AdoptedRadixCache


class AdoptedTransferEngine(L2TransferEngine, Protocol):
    inflight: Controller


class AdoptedResultProcessor(SchedulerBatchResultProcessor, Protocol):
    req_to_token_pool: AdoptedReqToTokenPool


class AdoptedPreallocQueue(DecodePreallocQueue, Protocol):
    scheduler: AdoptedScheduler


class AdoptedOutputStreamer(SchedulerOutputStreamer, Protocol):
    inflight: Controller


class AdoptedSender(SenderWrapper, Protocol):
    """The one to the tokenizer. The one to the detokenizer has none of ours."""

    inflight: Controller


class AdoptedScheduler(ReservingScheduler, Protocol):
    inflight: Controller
    output_streamer: AdoptedOutputStreamer
    req_to_token_pool: AdoptedReqToTokenPool


class AdoptedTransferQueue(DecodeTransferQueue, Protocol):
    scheduler: AdoptedScheduler
