"""SGLang's scheduler, with its sockets and queues. All its work is on one thread, its loop's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sglang_inflight.scheduler.sglang_types.model_runner import (
    DraftWorker,
    LoRANameTable,
    SchedulerWeightUpdaterManager,
    TpModelWorker,
)
from sglang_inflight.scheduler.sglang_types.pools import ReqToTokenPool, TokenToKVPoolAllocator
from sglang_inflight.scheduler.sglang_types.req import (
    KVConnection,
    PPBatchMetadata,
    Req,
    ScheduleBatch,
    SpeculativeAlgorithm,
)
from sglang_inflight.sglang_types.describes import describes
from sglang_inflight.sglang_types.requests import Request, TypeBasedDispatcher
from sglang_inflight.sglang_types.server_args import ServerArgs

if TYPE_CHECKING:
    import torch


@describes("sglang.srt.managers.scheduler_components.output_sender.SenderWrapper")
class SenderWrapper(Protocol):
    # a zmq.Socket; None on all ranks but a replica's first
    socket: Any | None

    def send_output(self, output: Any, recv_obj: object | None = None) -> None: ...


@describes("sglang.srt.managers.scheduler_components.ipc_channels.SchedulerIpcChannels")
class SchedulerIpcChannels(Protocol):
    # a zmq.Socket, or the scripted runtime's substitute
    recv_from_tokenizer: Any
    recv_from_rpc: Any | None
    send_to_tokenizer: SenderWrapper


_COMPONENTS = "sglang.srt.managers.scheduler_components"


@describes(f"{_COMPONENTS}.load_inquirer.SchedulerLoadInquirer")
class SchedulerLoadInquirer(Protocol):
    def get_loads(self) -> Any: ...


@describes(f"{_COMPONENTS}.load_publisher.SchedulerLoadPublisher")
class SchedulerLoadPublisher(Protocol):
    def publish_load_stat(
        self, load_provider: Callable[[], Any], force: bool = False, snapshot: Any | None = None
    ) -> None: ...


@describes("sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer")
class SchedulerOutputStreamer(Protocol):
    has_additional_customized_info: bool
    # false for an embedding model
    is_generation: bool

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]: ...
    def stream_output(self, reqs: list[Req], return_logprob: bool) -> None: ...


@describes(
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
)
class SchedulerBatchResultProcessor(Protocol):
    req_to_token_pool: ReqToTokenPool


@describes("sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo")
class MLPSyncBatchInfo(Protocol):
    # on the host, (attention DP groups, numbers per group)
    tp0_info_cpu: torch.Tensor


@describes("sglang.srt.constrained.grammar_manager.GrammarManager")
class GrammarManager(Protocol):
    grammar_queue: list[Req]


@describes("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue")
class PrefillBootstrapQueue(Protocol):
    queue: list[Req]


@describes("sglang.srt.disaggregation.decode.DecodeRequest")
class DecodeRequest(Protocol):
    req: Req
    # index of the row of ``MetadataBuffers`` sent with the KV
    metadata_buffer_index: int
    kv_receiver: KVConnection | None


@describes("sglang.srt.disaggregation.decode.DecodePreallocQueue")
class DecodePreallocQueue(Protocol):
    queue: list[DecodeRequest]
    retracted_queue: list[Req]
    # requests retracted by a pause: their prompts are prefilled again when generation continues
    held_rebootstrap_reqs: list[Req]


@describes("sglang.srt.disaggregation.decode.DecodeTransferQueue")
class DecodeTransferQueue(Protocol):
    queue: list[DecodeRequest]
    # host-side group of the ranks that take over the same requests in the same step
    gloo_group: Any

    def has_pending_deferred_releases(self) -> bool: ...


@describes("sglang.srt.disaggregation.utils.MetadataBuffers")
class MetadataBuffers(Protocol):
    """A row for each request between two servers. SGLang sends all 16 numbers of a row."""

    output_ids: torch.Tensor
    cached_tokens: torch.Tensor


@describes("sglang.srt.managers.hisparse_coordinator.HiSparseAct")
class HiSparseAct(Protocol):
    req: Req


@describes("sglang.srt.managers.hisparse_coordinator.HiSparseCoordinator")
class HiSparseCoordinator(Protocol):
    # requests whose KV is being backed up after their prefill
    ack_staging_queue: list[HiSparseAct]

    def request_finished(self, req: Req) -> None: ...


@describes("sglang.srt.beam_search.coordinator.BeamCoordinator")
class BeamCoordinator(Protocol):
    _num_live_groups: int

    def retire_group(self, req: Req) -> None: ...
    def _free_member_rows(self, group: Any) -> None: ...


@describes("sglang.srt.managers.scheduler.Scheduler")
class Scheduler(Protocol):
    server_args: ServerArgs

    # ---- requests and batches ------------------------------------------------------
    waiting_queue: list[Req]
    grammar_manager: GrammarManager
    hisparse_coordinator: HiSparseCoordinator | None
    beam_coordinator: BeamCoordinator
    chunked_req: Req | None
    running_batch: ScheduleBatch
    last_batch: ScheduleBatch | None
    cur_batch_for_debug: ScheduleBatch | None
    # only in the overlap loop, oldest first
    result_queue: deque[tuple[ScheduleBatch, Any]]
    # only in the pipeline's loop, one for each microbatch
    mbs: list[ScheduleBatch | None]
    running_mbs: list[ScheduleBatch]
    last_mbs: list[ScheduleBatch | None]
    mb_metadata: list[PPBatchMetadata | None]
    # an enum of SGLang's; each queue exists only on servers of its mode
    disaggregation_mode: Any
    disagg_metadata_buffers: MetadataBuffers
    disagg_prefill_bootstrap_queue: PrefillBootstrapQueue
    disagg_prefill_inflight_queue: list[Req]
    disagg_decode_prealloc_queue: DecodePreallocQueue
    disagg_decode_transfer_queue: DecodeTransferQueue
    # received messages that are not handled yet
    _deferred_input_requests: list[Any]

    def process_prefill_chunk(
        self, last_batch: ScheduleBatch | None, running_batch: ScheduleBatch
    ) -> None: ...
    def process_disagg_prefill_inflight_queue(self) -> list[Req]: ...
    def collect_inflight_reqs(self) -> set[Req]: ...
    def _collect_inflight_batches(self) -> list[ScheduleBatch | None]: ...
    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None: ...
    def _add_request_to_queue(self, req: Req) -> None: ...
    def abort_request(self, recv_req: Request) -> None: ...
    def _release_aborted_request(self, req: Req) -> None: ...
    def is_fully_idle(
        self, for_health_check: bool = False, ignore_waiting: bool = False
    ) -> bool: ...

    # ---- pauses --------------------------------------------------------------------
    _engine_paused: bool

    def pause_generation(self, recv_req: Request) -> None: ...
    def continue_generation(self, recv_req: Request) -> None: ...
    def _record_scheduler_state_for_paused_engine(self) -> None: ...

    # ---- KV ------------------------------------------------------------------------
    page_size: int
    max_total_num_tokens: int
    is_mixed_chunk: bool
    spec_algorithm: SpeculativeAlgorithm
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool_allocator: TokenToKVPoolAllocator
    # passed on to SGLang's functions; one of many classes
    tree_cache: Any

    def flush_cache(self, empty_cache: bool = True) -> bool: ...

    # ---- the model and its streams -------------------------------------------------
    device: str
    # torch.cuda or its like, and its streams. A loop has only the streams it uses
    device_module: Any
    schedule_stream: Any
    forward_stream: Any
    copy_stream: Any
    pp_comm_stream: Any
    tp_worker: TpModelWorker
    draft_worker: DraftWorker | None
    weight_updater: SchedulerWeightUpdaterManager
    kv_event_lora_names: LoRANameTable

    # ---- messages and outputs ------------------------------------------------------
    ipc_channels: SchedulerIpcChannels
    output_streamer: SchedulerOutputStreamer
    load_inquirer: SchedulerLoadInquirer
    load_publisher: SchedulerLoadPublisher
    _request_dispatcher: TypeBasedDispatcher

    def publish_load_snapshot(self, force: bool = False) -> Any: ...
    def maybe_send_health_check_signal(self) -> None: ...
