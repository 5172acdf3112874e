"""A request in a scheduler's hands."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any, Literal, Protocol

from sglang_inflight.scheduler.sglang_types.beams import BeamGroup
from sglang_inflight.sglang_types.describes import describes
from sglang_inflight.sglang_types.sampling_params import SamplingParams


@describes("sglang.srt.managers.schedule_batch.ReqKvInfo")
class ReqKvInfo(Protocol):
    """``req_pool_idx`` is the row of its slots; the KV is committed up to ``kv_committed_len``."""

    req_pool_idx: int | None
    kv_committed_len: int
    # of its first positions the prefix cache has the KV
    cache_protected_len: int
    # of a decode server alone: what the host has of a request that was sent back
    retraction_backup: Any | None

    @property
    def holds_kv(self) -> bool: ...


@describes(
    "sglang.srt.disaggregation.common.conn.CommonKVSender",
    "sglang.srt.disaggregation.common.conn.CommonKVReceiver",
)
class KVConnection(Protocol):
    """One end of a request's way between two servers. Since ``time.time()``, or None."""

    init_time: float | None


@describes("sglang.srt.observability.req_time_stats.SchedulerReqTimeStats")
class SchedulerReqTimeStats(Protocol):
    """Times are those of ``time.perf_counter()``, and 0 where they are not set."""

    wait_queue_entry_time: float
    forward_entry_time: float

    def set_completion_time(self) -> None: ...


@describes("sglang.srt.session.session_controller.Session")
class Session(Protocol):
    """Requests that go on where the one before has ended."""

    session_id: str
    # it keeps its KV from one request to the next, and has one request at a time
    streaming: bool

    # its request has ended and left nothing to go on from
    def abort_req(self) -> None: ...


@describes("sglang.srt.managers.schedule_batch.Req")
class Req(Protocol):
    rid: str
    # of the tokenizer worker that it came by; None where there is one
    http_worker_ipc: str | None
    # has the adapter's id in it
    extra_key: str | None
    lora_id: str | None
    is_retracted: bool
    kv: ReqKvInfo
    # holds its prefix in the cache, unless a session does
    lock: Any | None
    session: Session | None
    origin_input_ids: Sequence[int]
    output_ids: MutableSequence[int]
    # of its prompt, instead of tokens: (tokens, hidden size)
    input_embeds: list[list[float]] | None
    return_logprob: bool
    return_hidden_states: bool | Literal["last"]
    # rows, and blocks of them
    hidden_states: list[Any]
    retraction_count: int
    # of its beam search, which it leads
    beam_group: BeamGroup | None
    sampling_params: SamplingParams
    skip_radix_cache_insert: bool
    # a ``Future`` of it while it is made, and None where there is none
    grammar: Any | None
    time_stats: SchedulerReqTimeStats
    weight_version_events: list[Any]
    # the reason for which it ends with its next result, and for which it has ended
    to_finish: Any | None
    finished_reason: Any | None
    # between a prefill server and a decode server: of the transfer, and its row
    bootstrap_room: int | None
    metadata_buffer_index: int
    # the last token of a request whose prompt is sent for again, while it is not in ``output_ids``
    pd_rebootstrap_forced_output_id: int | None
    # of a prefill server alone. Its way to the decode server is known only when the latter has
    # asked for its KV, and it may be prefilled before
    disagg_kv_sender: KVConnection | None
    pending_bootstrap: bool

    # prompt and output
    @property
    def seqlen(self) -> int: ...

    @property
    def output_ids_through_stop(self) -> Sequence[int]: ...
    def detach_kv(self) -> ReqKvInfo: ...
    def finished(self) -> bool: ...
    def set_finish_with_abort(self, error_msg: str) -> None: ...
    def update_finish_state(self) -> None: ...
