"""Types of SGLang's objects with our attributes. Only type checkers import this module."""

from __future__ import annotations

from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.mem_cache.l2_transfer import L2TransferEngine
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_inflight.scheduler.controller import Controller
from sglang_inflight.scheduler.update.reservation import ReservingScheduler


class PatchedReqToTokenPool(ReqToTokenPool):
    inflight: Controller


class PatchedTransferEngine(L2TransferEngine):
    inflight: Controller


class PatchedOutputStreamer(SchedulerOutputStreamer):
    inflight: Controller


class PatchedSender(SenderWrapper):
    """The sender to the tokenizer. The sender to the detokenizer has no controller."""

    inflight: Controller


class PatchedScheduler(ReservingScheduler):
    inflight: Controller
    output_streamer: PatchedOutputStreamer
    req_to_token_pool: PatchedReqToTokenPool
