"""Writes a forward's result to its requests."""

from __future__ import annotations

from typing import Protocol

from sglang_inflight.scheduler.sglang_types.pools import ReqToTokenPool
from sglang_inflight.sglang_types.describes import describes


@describes(
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
)
class SchedulerBatchResultProcessor(Protocol):
    req_to_token_pool: ReqToTokenPool
