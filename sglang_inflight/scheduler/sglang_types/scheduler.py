"""The scheduler. All its work is on one thread, its loop's."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from sglang_inflight.scheduler.sglang_types.ipc_channels import SchedulerIpcChannels
from sglang_inflight.scheduler.sglang_types.load import (
    SchedulerLoadInquirer,
    SchedulerLoadPublisher,
)
from sglang_inflight.scheduler.sglang_types.lora import LoRANameTable
from sglang_inflight.scheduler.sglang_types.model_runner import (
    DraftWorker,
    SchedulerWeightUpdaterManager,
    TpModelWorker,
)
from sglang_inflight.scheduler.sglang_types.output_streamer import SchedulerOutputStreamer
from sglang_inflight.scheduler.sglang_types.pools import ReqToTokenPool, TokenToKVPoolAllocator
from sglang_inflight.scheduler.sglang_types.queues import (
    DecodePreallocQueue,
    DecodeTransferQueue,
    GrammarManager,
    HiSparseCoordinator,
    MetadataBuffers,
    PrefillBootstrapQueue,
)
from sglang_inflight.scheduler.sglang_types.req import Req
from sglang_inflight.scheduler.sglang_types.schedule_batch import (
    PPBatchMetadata,
    ScheduleBatch,
    SpeculativeAlgorithm,
)
from sglang_inflight.sglang_types.describes import describes
from sglang_inflight.sglang_types.dispatcher import TypeBasedDispatcher
from sglang_inflight.sglang_types.requests import Request


@describes("sglang.srt.beam_search.coordinator.BeamCoordinator")
class BeamCoordinator(Protocol):
    _num_live_groups: int

    def retire_group(self, req: Req) -> None: ...
    def _free_member_rows(self, group: Any) -> None: ...


@describes("sglang.srt.managers.scheduler.Scheduler")
class Scheduler(Protocol):
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
