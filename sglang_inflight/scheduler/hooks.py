"""Hooks from a scheduler's methods to its controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from sglang.srt.managers.io_struct import AbortReq, BaseReq
from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang.srt.managers.schedule_batch import Req as AnyRequest
from sglang.srt.plugins.hook_registry import HookType

from sglang_inflight.messages import KV_VERSIONS, RECORDS
from sglang_inflight.scheduler.adapter_config import read_config, scale
from sglang_inflight.scheduler.adapter_weights import merge, read_weights, take
from sglang_inflight.scheduler.captures import capture_beside_other_threads
from sglang_inflight.scheduler.collectives import CONTROL_SYNC
from sglang_inflight.scheduler.controller import Controller
from sglang_inflight.scheduler.fixes import (
    append_hidden_states,
    count_frequencies,
    count_tokens,
    detach_refused,
    embed_tokens,
    end_turns_of_aborted,
    keep_output,
    look_for_embeddings,
    mask_nothing,
    move_kv_to_turn,
    note_presence,
    note_repetition,
    unmask_rows_without_tokens,
)
from sglang_inflight.scheduler.host_tier import engine_of
from sglang_inflight.scheduler.nodes import check_nodes_match
from sglang_inflight.scheduler.request_names import NAMES
from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.scheduler.update.made_by_forwards import MadeByForwards
from sglang_inflight.scheduler.update.reservation import loaded_models, reserve
from sglang_inflight.scheduler.versions.captured import forget, records_of
from sglang_inflight.scheduler.versions.token_versions import write_spans
from sglang_inflight.settings import Settings
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.unsupported import refuse_what_was_not_asked

if TYPE_CHECKING:
    import torch
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.managers.io_struct import LoRAUpdateOutput, UnloadLoRAAdapterReqInput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler_components.dp_attn import MLPSyncBatchInfo
    from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.mem_cache.l2_transfer import L2Transfer
    from sglang.srt.server_args import PortArgs

    from sglang_inflight.scheduler.patched_types import (
        PatchedPreallocQueue,
        PatchedReqToTokenPool,
        PatchedResultProcessor,
        PatchedScheduler,
        PatchedSender,
        PatchedStreamingSession,
        PatchedTransferEngine,
        PatchedTransferQueue,
    )
    from sglang_inflight.scheduler.update.reservation import ReservingScheduler
    from sglang_inflight.sglang_types import LoadAdapterRequest, ServerArgs


def meet_other_nodes(scheduler: ReservingScheduler, *args: Any, **kwargs: Any) -> None:
    check_nodes_match()


def reserve_shadow(scheduler: ReservingScheduler) -> None:
    settings = Settings.from_environment()
    scheduler.inflight_reservation = reserve(scheduler, settings.staging)
    models = loaded_models(scheduler)
    scheduler.inflight_made = {id(model): MadeByForwards(model) for model in models}


def create_controller(
    _: None, scheduler: PatchedScheduler, server_args: ServerArgs, port_args: PortArgs
) -> None:
    refuse_what_was_not_asked(server_args)
    controller = scheduler.inflight = Controller(scheduler, port_args)
    scheduler.output_streamer.inflight = controller
    scheduler.req_to_token_pool.inflight = controller
    cast("PatchedSender", scheduler.ipc_channels.send_to_tokenizer).inflight = controller
    look_for_embeddings(scheduler)
    if (engine := engine_of(scheduler.tree_cache)) is not None:
        cast("PatchedTransferEngine", engine).inflight = controller


def hold_back_while_draining(
    schedule: Callable[..., Any], scheduler: PatchedScheduler, *args: Any, **kwargs: Any
) -> Any:
    return scheduler.inflight.admit(lambda: schedule(scheduler, *args, **kwargs))


def request_no_kv_while_draining(
    ask: Callable[..., Any], prealloc: PatchedPreallocQueue, *args: Any, **kwargs: Any
) -> Any:
    return prealloc.scheduler.inflight.ask_for_kv(lambda: ask(prealloc, *args, **kwargs))


def enqueue(
    add: Callable[..., None], scheduler: PatchedScheduler, req: Req, *args: Any, **kwargs: Any
) -> None:
    if scheduler.inflight.enqueue(req):
        add(scheduler, req, *args, **kwargs)


def abort_own_requests(
    abort: Callable[..., None], scheduler: PatchedScheduler, recv_req: AbortReq
) -> None:
    if scheduler.inflight.before_abort(recv_req):
        abort(scheduler, recv_req)


def keep_accepted(limit: Callable[..., bool], scheduler: PatchedScheduler, recv_req: Req) -> bool:
    """Keep retracted requests in a full queue: they were accepted before."""
    return not recv_req.is_retracted and limit(scheduler, recv_req)


def label_after_result(
    _: None, scheduler: PatchedScheduler, batch: ScheduleBatch, *args: Any, **kwargs: Any
) -> None:
    scheduler.inflight.after_result(batch)


def change_label(scheduler: PatchedScheduler, new_version: str | None) -> None:
    """Change the label after the results of the old weights were processed."""
    scheduler.inflight.versions.rename(new_version)


def stop_clocks_while_held(
    poll: Callable[[PatchedScheduler], list[Any]], scheduler: PatchedScheduler
) -> list[Any]:
    """Time out no request while a pause or an update holds it. Leases still expire."""
    aborts = [] if scheduler.inflight.hold.is_on else poll(scheduler)
    return [*aborts, *scheduler.inflight.pause.times_over()]


def choose_batch(
    choose: Callable[..., Any], scheduler: PatchedScheduler, *args: Any, **kwargs: Any
) -> Any:
    """Choose a batch of the version whose turn it is; launch nothing in a pipeline's held turn.

    A pipeline's loop calls only this method between messages and launch.
    """
    if get_parallel().pp_size == 1:
        return scheduler.inflight.turns.choose(
            lambda running, last: choose(scheduler, running_batch=running, last_batch=last)
        )
    if scheduler.inflight.holds_the_turn():
        return NextBatchPlan(batch_to_run=None, running_batch=scheduler.running_batch)
    # a deferred call may have retracted the batches that the loop passed in
    return choose(scheduler, running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)


def refuse_names_in_use(pull: Callable[[object], list[Any] | None], receiver: object) -> Any:
    return NAMES.take(pull(receiver))


def sync_control_calls(
    process: Callable[..., None], scheduler: PatchedScheduler, recv_reqs: list[Any]
) -> None:
    process(scheduler, CONTROL_SYNC.take(recv_reqs))


def append_call_count(row: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return CONTROL_SYNC.append_count(row)


def append_count_of_absent_rank(row: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return CONTROL_SYNC.count_for_absent_rank(row)


def take_counts(_: None, exchanged: MLPSyncBatchInfo, *args: Any, **kwargs: Any) -> None:
    CONTROL_SYNC.take_counts(exchanged)


def skip_idle_work_while_held(idle: Callable[..., None], scheduler: PatchedScheduler) -> None:
    """Skip SGLang's idle work while a turn is held or a control call waits.

    A pipeline's loop without a launch counts as idle, and its pools would fail the idle check.
    An idle loop may also sleep until a message comes, before it takes in the waiting call.
    """
    if not scheduler.inflight.hold.keeps_back_requests and not CONTROL_SYNC.is_waiting:
        idle(scheduler)


def include_held_batches(
    collect: Callable[..., list[Any]], scheduler: PatchedScheduler
) -> list[ScheduleBatch | None]:
    """Add a parked version's batches, and the prefilled requests of held microbatches."""
    return [*collect(scheduler), *_held_batches(scheduler)]


def _held_batches(scheduler: PatchedScheduler) -> list[ScheduleBatch]:
    return [*scheduler.inflight.parked_batches, *_held_microbatches(scheduler)]


def _held_microbatches(scheduler: PatchedScheduler) -> list[ScheduleBatch]:
    if get_parallel().pp_size == 1 or not scheduler.inflight.hold.keeps_back_requests:
        return []
    return [batch for batch in scheduler.last_mbs if batch is not None]


def is_idle(
    is_fully_idle: Callable[..., bool], scheduler: PatchedScheduler, *args: Any, **kwargs: Any
) -> bool:
    """Return False for a health check while the loop is held, so that it waits for no forward.

    Also return False while a pipeline owes a turn to prefilled requests.
    """
    if kwargs.get("for_health_check") and scheduler.inflight.hold.is_on:
        return False
    if any(not req.finished() for batch in _held_batches(scheduler) for req in batch.reqs):
        return False
    return is_fully_idle(scheduler, *args, **kwargs)


def copy_request_id(
    sender: SenderWrapper, output: Any, recv_obj: object = None, *args: Any, **kwargs: Any
) -> None:
    """Copy the request's id to the answer, so that no other caller takes the answer."""
    if isinstance(output, BaseReq) and isinstance(recv_obj, BaseReq) and output.rid is None:
        output.rid = recv_obj.rid


def end_with_output(
    send: Callable[..., None],
    sender: SenderWrapper,
    output: Any,
    recv_obj: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """End an aborted request by its last output, if it has made tokens."""
    controller: Controller | None = getattr(sender, "inflight", None)
    is_abort = isinstance(output, AbortReq) and isinstance(recv_obj, AnyRequest)
    if controller is None or not is_abort or not controller.abort_with_output(recv_obj, output):
        send(sender, output, recv_obj, *args, **kwargs)


def launch(
    run: Callable[..., Any],
    scheduler: PatchedScheduler,
    batch: ScheduleBatch,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return scheduler.inflight.launch(batch, lambda: run(scheduler, batch, *args, **kwargs))


def record_taken(
    tokens: list[list[int]],
    processor: PatchedResultProcessor,
    result: object,
    batch: ScheduleBatch,
) -> None:
    processor.req_to_token_pool.inflight.after_verifying(batch.reqs, tokens)


def read_before_release(req: Req, tree_cache: Any, *args: Any, **kwargs: Any) -> None:
    """Read a finished request's slots before the prefix cache puts its own in their place."""
    pool: PatchedReqToTokenPool = tree_cache.req_to_token_pool
    if req.finished() and req.kv.holds_kv:
        pool.inflight.before_release(req)


def read_before_freeing(pool: PatchedReqToTokenPool, req: object) -> None:
    # an ending streaming session frees a row, too, and is no request
    if isinstance(req, AnyRequest):
        pool.inflight.before_release(req)


def forget_without_tokens(_: None, req: Req) -> None:
    """Drop the captured rows of a request that begins anew, after ``keep_output``."""
    if not req.output_ids:
        forget(req)


def keep_before_caching(req: Req, tree_cache: Any) -> None:
    pool: PatchedReqToTokenPool = tree_cache.req_to_token_pool
    pool.inflight.before_caching(req)


def end_turn(keep: Callable[..., bool], sessions: PatchedStreamingSession, req: Req) -> bool:
    """Leave a finished request's row to its streaming session; free a retracted one's."""
    slot = sessions.borrowed_slot(req)
    if slot is None:
        return keep(sessions, req)
    if not req.finished():
        move_kv_to_turn(sessions, slot, req)
        return False
    controller = sessions.cache.req_to_token_pool.inflight
    return controller.end_turn(lambda: keep(sessions, req), req)


def load_adapter(
    load: Callable[..., LoRAUpdateOutput],
    scheduler: PatchedScheduler,
    recv_req: LoadAdapterRequest,
) -> LoRAUpdateOutput:
    return scheduler.inflight.adapters.load(lambda: load(scheduler, recv_req), recv_req)


def unload_adapter(
    unload: Callable[..., LoRAUpdateOutput],
    scheduler: PatchedScheduler,
    recv_req: UnloadLoRAAdapterReqInput,
) -> LoRAUpdateOutput:
    return scheduler.inflight.adapters.unload(lambda: unload(scheduler, recv_req), recv_req)


def extend_output_streamer(get_class: Callable[..., type], scheduler: PatchedScheduler) -> type:
    return _extend(get_class(scheduler))


def _extend(base: type[SchedulerOutputStreamer]) -> type[SchedulerOutputStreamer]:
    """Return a subclass of ``base`` with our fields in each request's last output."""

    class OutputStreamer(base):  # type: ignore[valid-type, misc]
        has_additional_customized_info = True
        inflight: Controller  # set by ``create_controller``, before the first output

        def stream_output(self, reqs: list[Req], *args: Any, **kwargs: Any) -> None:
            self.inflight.before_last_outputs(reqs)
            super().stream_output(reqs, *args, **kwargs)

        def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]:
            info: dict[str, list[Any]] = super().build_additional_customized_info(reqs)
            # only ended requests have such fields, and a step seldom ends one
            if not any(req.finished() for req in reqs):
                return info
            self.inflight.before_output(reqs)
            added: dict[str, list[Any]] = {
                KV_VERSIONS: [record_of(req).kv_versions for req in reqs],
                RECORDS: [records_of(req) if req.finished() else None for req in reqs],
            }
            return info | {
                name: values for name, values in added.items() if any(v is not None for v in values)
            }

    return OutputStreamer


def follow_to_host(
    engine: PatchedTransferEngine, transfers: list[L2Transfer], *args: Any, **kwargs: Any
) -> None:
    # without a controller yet: this KV is of the first weights, and needs no record
    if (controller := getattr(engine, "inflight", None)) is not None:
        controller.follow_to_host(transfers)


def follow_from_host(
    engine: PatchedTransferEngine, transfers: list[L2Transfer], *args: Any, **kwargs: Any
) -> None:
    if (controller := getattr(engine, "inflight", None)) is not None:
        controller.follow_from_host(transfers)


def send_handover(
    scheduler: PatchedScheduler, req: Req, last_chunk: bool = False, *args: Any, **kwargs: Any
) -> None:
    if last_chunk:
        scheduler.inflight.handover.send(req)


def enqueue_again(_: None, scheduler: PatchedScheduler, req: Req) -> None:
    scheduler.inflight.enqueue_again(req)


def receive_handover(
    commit: Callable[..., None], queue: PatchedTransferQueue, decode_req: DecodeRequest
) -> None:
    queue.scheduler.inflight.handover.receive(lambda: commit(queue, decode_req), decode_req)


def back_up_versions(
    req: Req,
    tree_cache: object,
    req_to_token_pool: PatchedReqToTokenPool,
    *args: Any,
    **kwargs: Any,
) -> None:
    req_to_token_pool.inflight.back_up(req)


def restore_versions(
    req: Req,
    tree_cache: object,
    req_to_token_pool: PatchedReqToTokenPool,
    *args: Any,
    **kwargs: Any,
) -> None:
    req_to_token_pool.inflight.restore(req)


_LORA = "sglang.srt.lora"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_DECODE = "sglang.srt.disaggregation.decode"
_PROCESSOR = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
)
_SENDER = "sglang.srt.managers.scheduler_components.output_sender.SenderWrapper"
_PREFILL = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
_KV = "sglang.srt.mem_cache.common"
_SPANS = "sglang.srt.utils.weight_versions"
_TRANSFERS = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine"
_EXCHANGE = "sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo"
_SESSIONS = "sglang.srt.session.streaming_session.StreamingSession"
_SESSION = "sglang.srt.session.session_controller.Session"
_PENALTIES = "sglang.srt.sampling.penaltylib"
_FORWARD_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
_REQ = "sglang.srt.managers.schedule_batch.Req"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"

HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    # right after the rendezvous of the ranks, before steps of different length on each node
    (f"{_SCHEDULER}.init_ipc_channels", meet_other_nodes, HookType.BEFORE),
    (f"{_SCHEDULER}.init_memory_pools", reserve_shadow, HookType.BEFORE),
    (f"{_SCHEDULER}.__init__", create_controller, HookType.AFTER),
    (f"{_SCHEDULER}.get_new_batch_prefill", hold_back_while_draining, HookType.AROUND),
    (
        f"{_DECODE}.SchedulerDisaggregationDecodeMixin._get_new_prebuilt_batch",
        hold_back_while_draining,
        HookType.AROUND,
    ),
    (
        f"{_DECODE}.DecodePreallocQueue.pop_preallocated",
        request_no_kv_while_draining,
        HookType.AROUND,
    ),
    (f"{_SCHEDULER}.get_next_batch_to_run", choose_batch, HookType.AROUND),
    (
        "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
        "._pull_raw_reqs",
        refuse_names_in_use,
        HookType.AROUND,
    ),
    (f"{_SCHEDULER}.process_input_requests", sync_control_calls, HookType.AROUND),
    (f"{_EXCHANGE}._get_local_tensor", append_call_count, HookType.AFTER),
    (f"{_EXCHANGE}._get_fallback_tensor", append_count_of_absent_rank, HookType.AFTER),
    (f"{_EXCHANGE}.all_gather", take_counts, HookType.AFTER),
    (f"{_SCHEDULER}.on_idle", skip_idle_work_while_held, HookType.AROUND),
    (f"{_SCHEDULER}._collect_inflight_batches", include_held_batches, HookType.AROUND),
    (f"{_SCHEDULER}._add_request_to_queue", enqueue, HookType.AROUND),
    (f"{_SCHEDULER}.abort_request", abort_own_requests, HookType.AROUND),
    (f"{_SCHEDULER}._abort_on_queued_limit", keep_accepted, HookType.AROUND),
    (f"{_SCHEDULER}.process_batch_result", label_after_result, HookType.AFTER),
    (f"{_SCHEDULER}.record_weight_version_change", change_label, HookType.REPLACE),
    # hook the defining module: SGLang then replaces the name in every importing module
    (f"{_SPANS}.compute_weight_version_spans", write_spans, HookType.AROUND),
    (f"{_SCHEDULER}._poll_timeout_aborts", stop_clocks_while_held, HookType.AROUND),
    (f"{_SENDER}.send_output", copy_request_id, HookType.BEFORE),
    (f"{_SENDER}.send_output", end_with_output, HookType.AROUND),
    (f"{_SCHEDULER}.is_fully_idle", is_idle, HookType.AROUND),
    (f"{_SCHEDULER}.run_batch", launch, HookType.AROUND),
    ("torch.cuda.graphs.graph.__init__", capture_beside_other_threads, HookType.AROUND),
    (
        "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
        ".BreakableCUDAGraphCapture.__init__",
        capture_beside_other_threads,
        HookType.AROUND,
    ),
    (f"{_PROCESSOR}._resolve_spec_v2_tokens", record_taken, HookType.AFTER),
    (f"{_SCHEDULER}.load_lora_adapter", load_adapter, HookType.AROUND),
    (f"{_SCHEDULER}.load_lora_adapter_from_tensors", load_adapter, HookType.AROUND),
    (f"{_SCHEDULER}.unload_lora_adapter", unload_adapter, HookType.AROUND),
    (f"{_LORA}.lora_config.LoRAConfig.__init__", read_config, HookType.AROUND),
    (f"{_LORA}.lora.LoRAAdapter.__init__", scale, HookType.AFTER),
    (f"{_LORA}.lora.LoRAAdapter.initialize_weights", read_weights, HookType.AROUND),
    (f"{_LORA}.lora.LoRAAdapter._process_weight", take, HookType.AROUND),
    (f"{_LORA}.lora.LoRAAdapter.normalize_qkv_proj", merge, HookType.AROUND),
    (f"{_LORA}.lora.LoRAAdapter.normalize_gate_up_proj", merge, HookType.AROUND),
    (f"{_SCHEDULER}.get_output_streamer_class", extend_output_streamer, HookType.AROUND),
    (
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free",
        read_before_freeing,
        HookType.BEFORE,
    ),
    (f"{_DECODE}.DecodeReqToTokenPool.free", read_before_freeing, HookType.BEFORE),
    (f"{_KV}.release_kv_cache", read_before_release, HookType.BEFORE),
    (f"{_KV}.checkpoint_kv_cache", keep_before_caching, HookType.BEFORE),
    (f"{_SESSIONS}.try_cache_finished_req", end_turn, HookType.AROUND),
    (f"{_SESSION}.create_req", detach_refused, HookType.AFTER),
    (f"{_BATCH}.retract_decode", end_turns_of_aborted, HookType.AFTER),
    (f"{_REQ}.reset_for_retract", keep_output, HookType.AROUND),
    (f"{_REQ}.reset_for_retract", forget_without_tokens, HookType.AFTER),
    (f"{_FORWARD_BATCH}.init_new", embed_tokens, HookType.AFTER),
    (f"{_PROCESSOR}._append_prefill_hidden_states", append_hidden_states, HookType.AROUND),
    (f"{_PROCESSOR}.materialize_sampling_mask_output", mask_nothing, HookType.AFTER),
    (f"{_PREFILL}.send_kv_chunk", send_handover, HookType.BEFORE),
    (f"{_PREFILL}.optimistic_release_and_requeue", enqueue_again, HookType.AFTER),
    (
        f"{_DECODE}.DecodeTransferQueue._commit_transfer_to_req",
        receive_handover,
        HookType.AROUND,
    ),
    (f"{_KV}.backup_kv_cache", back_up_versions, HookType.BEFORE),
    (f"{_KV}.restore_kv_cache", restore_versions, HookType.BEFORE),
    (f"{_TRANSFERS}.submit_device_to_host", follow_to_host, HookType.BEFORE),
    (f"{_TRANSFERS}.submit_host_to_device", follow_from_host, HookType.BEFORE),
    *(
        (f"{_PENALTIES}.{penalizer}._prepare", count, HookType.AFTER)
        for penalizer, count in (
            ("frequency_penalty.BatchedFrequencyPenalizer", count_frequencies),
            ("presence_penalty.BatchedPresencePenalizer", note_presence),
            ("repetition_penalty.BatchedRepetitionPenalizer", note_repetition),
            ("min_new_tokens.BatchedMinNewTokensPenalizer", count_tokens),
        )
    ),
    (f"{_SAMPLING}.apply_logits_bias", unmask_rows_without_tokens, HookType.AFTER),
    (f"{_SAMPLING}.apply_logits_bias_with_observer", unmask_rows_without_tokens, HookType.AFTER),
]
