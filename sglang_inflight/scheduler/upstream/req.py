"""A request in a scheduler's hands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sglang_inflight.upstream.describes import describes
from sglang_inflight.upstream.sampling_params import SamplingParams


@describes("sglang.srt.managers.schedule_batch.ReqKvInfo")
class ReqKvInfo(Protocol):
    """``req_pool_idx`` is the row of its slots; the KV is committed up to ``kv_committed_len``."""

    req_pool_idx: int | None
    kv_committed_len: int


@describes("sglang.srt.observability.req_time_stats.SchedulerReqTimeStats")
class SchedulerReqTimeStats(Protocol):
    """Times are those of ``time.perf_counter()``, and 0 where they are not set."""

    wait_queue_entry_time: float
    forward_entry_time: float

    def set_completion_time(self) -> None: ...


@describes("sglang.srt.managers.schedule_batch.Req")
class Req(Protocol):
    rid: str
    # has the adapter's id in it
    extra_key: str | None
    lora_id: str | None
    is_retracted: bool
    kv: ReqKvInfo
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    return_logprob: bool
    sampling_params: SamplingParams
    skip_radix_cache_insert: bool
    time_stats: SchedulerReqTimeStats
    weight_version_events: list[Any]
    # the reason for which it ends with its next result
    to_finish: Any | None

    @property
    def output_ids_through_stop(self) -> Sequence[int]: ...
    def finished(self) -> bool: ...
    def update_finish_state(self) -> None: ...
