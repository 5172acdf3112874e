"""SGLang's requests, their batches and sampling parameters, and the input of a forward."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sglang_inflight.sglang_types.describes import describes
from sglang_inflight.sglang_types.requests import SamplingParams

if TYPE_CHECKING:
    import torch


@describes("sglang.srt.beam_search.beam_group.BeamGroup")
class BeamGroup(Protocol):
    beam_width: int
    length_penalty: float
    max_new_tokens: int
    num_return: int
    stop_token_ids: torch.Tensor
    # the group's request
    leader: Any


@describes("sglang.srt.managers.schedule_batch.ReqKvInfo")
class ReqKvInfo(Protocol):
    """``req_pool_idx`` is the row of its slots; the KV is committed up to ``kv_committed_len``."""

    req_pool_idx: int | None
    kv_committed_len: int
    # number of first positions whose KV is in the prefix cache
    cache_protected_len: int
    # only on a decode server: the host's copy of a retracted request's KV
    retraction_backup: Any | None

    @property
    def holds_kv(self) -> bool: ...


@describes(
    "sglang.srt.disaggregation.common.conn.CommonKVSender",
    "sglang.srt.disaggregation.common.conn.CommonKVReceiver",
)
class KVConnection(Protocol):
    """One end of a request's KV transfer between two servers."""

    # time.time() of its start, or None
    init_time: float | None


@describes("sglang.srt.observability.req_time_stats.SchedulerReqTimeStats")
class SchedulerReqTimeStats(Protocol):
    """Times of ``time.perf_counter()``, 0 if not set."""

    wait_queue_entry_time: float
    forward_entry_time: float

    def set_completion_time(self) -> None: ...


@describes("sglang.srt.session.session_controller.Session")
class Session(Protocol):
    """A series of requests, each continuing the one before."""

    session_id: str
    # true: one request at a time, and the KV is kept between requests
    streaming: bool

    # ends the session's request, and keeps none of its tokens
    def abort_req(self) -> None: ...


@describes("sglang.srt.managers.schedule_batch.Req")
class Req(Protocol):
    rid: str
    # socket of the request's tokenizer worker; None with one worker
    http_worker_ipc: str | None
    # contains the adapter's id
    extra_key: str | None
    lora_id: str | None
    is_retracted: bool
    kv: ReqKvInfo
    # keeps its prefix in the cache, unless a session's lock does
    lock: Any | None
    session: Session | None
    origin_input_ids: Sequence[int]
    output_ids: MutableSequence[int]
    # embeddings of the prompt, instead of tokens: (tokens, hidden size)
    input_embeds: list[list[float]] | None
    return_logprob: bool
    return_hidden_states: bool | Literal["last"]
    # rows, and blocks of rows
    hidden_states: list[Any]
    retraction_count: int
    # group of its beam search
    beam_group: BeamGroup | None
    sampling_params: SamplingParams
    skip_radix_cache_insert: bool
    # a ``Future`` while the grammar is compiled; None without a grammar
    grammar: Any | None
    time_stats: SchedulerReqTimeStats
    weight_version_events: list[Any]
    # reason to finish with the next result
    to_finish: Any | None
    # reason why it has finished
    finished_reason: Any | None
    # with disaggregation: id of the transfer, and its row of ``MetadataBuffers``
    bootstrap_room: int | None
    metadata_buffer_index: int
    # last token of a request to be prefilled again, kept out of ``output_ids`` until then
    pd_rebootstrap_forced_output_id: int | None
    # Only on a prefill server. ``pending_bootstrap``: the decode server has not asked for the KV
    # yet. The request may be prefilled before that.
    disagg_kv_sender: KVConnection | None
    pending_bootstrap: bool

    # length of prompt and output
    @property
    def seqlen(self) -> int: ...

    @property
    def output_ids_through_stop(self) -> Sequence[int]: ...
    def detach_kv(self) -> ReqKvInfo: ...
    def finished(self) -> bool: ...
    def set_finish_with_abort(self, error_msg: str) -> None: ...
    def update_finish_state(self) -> None: ...


@describes("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo")
class SamplingBatchInfo(Protocol):
    # None in a step without a grammar
    grammar_mask: Any


_LIBRARY = "sglang.srt.sampling.penaltylib"


@describes(f"{_LIBRARY}.orchestrator.BatchedPenalizerOrchestrator")
class Orchestrator(Protocol):
    device: str

    # SGLang returns None for a freed batch, but penalizers do not outlive their batch
    @property
    def batch(self) -> ScheduleBatch: ...
    def reqs(self) -> list[Req]: ...


@describes(f"{_LIBRARY}.orchestrator._BatchedPenalizer")
class Penalizer(Protocol):
    """Tensors have a row for each request of the batch."""

    @property
    def orchestrator(self) -> Orchestrator: ...


@describes(f"{_LIBRARY}.frequency_penalty.BatchedFrequencyPenalizer")
class FrequencyPenalizer(Penalizer, Protocol):
    # shapes (requests, 1) and (requests, vocabulary)
    frequency_penalties: torch.Tensor
    cumulated_frequency_penalties: torch.Tensor


@describes(f"{_LIBRARY}.presence_penalty.BatchedPresencePenalizer")
class PresencePenalizer(Penalizer, Protocol):
    presence_penalties: torch.Tensor
    cumulated_presence_penalties: torch.Tensor


@describes(f"{_LIBRARY}.repetition_penalty.BatchedRepetitionPenalizer")
class RepetitionPenalizer(Penalizer, Protocol):
    repetition_penalties: torch.Tensor
    cumulated_repetition_penalties: torch.Tensor


@describes(f"{_LIBRARY}.min_new_tokens.BatchedMinNewTokensPenalizer")
class MinNewTokensPenalizer(Penalizer, Protocol):
    # (requests, 1)
    len_output_tokens: torch.Tensor


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


@describes("sglang.srt.model_executor.forward_batch_info.ForwardBatch")
class ForwardBatch(Protocol):
    # (tokens), perhaps with padding
    input_ids: torch.Tensor
    # (tokens with an embedding in their request, hidden size); None without such tokens
    input_embeds: torch.Tensor | None
