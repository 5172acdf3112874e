"""The hooks that tie a scheduler to its controller, at the boundaries of its methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang.srt.plugins.hook_registry import HookType

from sglang_inflight.messages import BaseReq
from sglang_inflight.scheduler.controller import Controller
from sglang_inflight.scheduler.guard.sampling import leave_a_token
from sglang_inflight.scheduler.host_tier import engine_of
from sglang_inflight.scheduler.nodes.meeting import meet
from sglang_inflight.scheduler.output_streamer import extend
from sglang_inflight.scheduler.provenance.token_versions import write_spans
from sglang_inflight.scheduler.update.reservation import reserve
from sglang_inflight.settings import Settings
from sglang_inflight.upstream.runtime_context import get_parallel

if TYPE_CHECKING:
    from sglang_inflight.scheduler.adopted import (
        AdoptedReqToTokenPool,
        AdoptedResultProcessor,
        AdoptedScheduler,
        AdoptedTransferEngine,
        ReservingScheduler,
    )
    from sglang_inflight.scheduler.upstream.ipc_channels import SenderWrapper
    from sglang_inflight.scheduler.upstream.lora import LoRAUpdateOutput
    from sglang_inflight.scheduler.upstream.pools import L2Transfer
    from sglang_inflight.scheduler.upstream.req import Req
    from sglang_inflight.scheduler.upstream.schedule_batch import ScheduleBatch
    from sglang_inflight.upstream.requests import LoadAdapterRequest, UnloadAdapterRequest
    from sglang_inflight.upstream.server_args import PortArgs, ServerArgs


def meet_other_nodes(scheduler: ReservingScheduler, *args: Any, **kwargs: Any) -> None:
    meet()


def reserve_shadow(scheduler: ReservingScheduler) -> None:
    scheduler.inflight_reservation = reserve(scheduler, Settings.from_environment().staging)


def create_controller(
    _: None, scheduler: AdoptedScheduler, server_args: ServerArgs, port_args: PortArgs
) -> None:
    controller = scheduler.inflight = Controller(scheduler, port_args)
    scheduler.output_streamer.inflight = controller
    scheduler.req_to_token_pool.inflight = controller
    if (engine := engine_of(scheduler.tree_cache)) is not None:
        engine.inflight = controller


def hold_back_while_draining(
    schedule: Callable[..., Any], scheduler: AdoptedScheduler, *args: Any, **kwargs: Any
) -> Any:
    return scheduler.inflight.admit(lambda: schedule(scheduler, *args, **kwargs))


def enqueue(scheduler: AdoptedScheduler, req: Req, *args: Any, **kwargs: Any) -> None:
    scheduler.inflight.enqueue(req)


def keep_accepted(limit: Callable[..., bool], scheduler: AdoptedScheduler, recv_req: Req) -> bool:
    """A retracted request was accepted once: a full queue does not drop it."""
    return not recv_req.is_retracted and limit(scheduler, recv_req)


def label_after_result(
    _: None, scheduler: AdoptedScheduler, batch: ScheduleBatch, *args: Any, **kwargs: Any
) -> None:
    scheduler.inflight.after_result(batch)


def change_label(scheduler: AdoptedScheduler, new_version: str | None) -> None:
    """Every change of the label waits for the results of the weights before it."""
    scheduler.inflight.versions.rename(new_version)


def stop_clocks_while_frozen(
    poll: Callable[[AdoptedScheduler], list[Any]], scheduler: AdoptedScheduler
) -> list[Any]:
    """No request times out while a pause holds it; the pause itself may."""
    aborts = [] if scheduler.inflight.is_frozen else poll(scheduler)
    return [*aborts, *scheduler.inflight.pause.times_over()]


def hold_the_turn(
    choose: Callable[..., Any], scheduler: AdoptedScheduler, *args: Any, **kwargs: Any
) -> Any:
    """A pipeline's loop asks for nothing else between the messages and the launch."""
    if get_parallel().pp_size == 1:
        return choose(scheduler, *args, **kwargs)
    if scheduler.inflight.holds_the_turn():
        return NextBatchPlan(batch_to_run=None, running_batch=scheduler.running_batch)
    # what was waited for may have retracted those that the loop had read
    return choose(scheduler, running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)


def stay_idle_while_held(idle: Callable[..., None], scheduler: AdoptedScheduler) -> None:
    """A pipeline's loop that launches nothing takes itself for idle, and checks its pools."""
    if not scheduler.inflight.holds_back:
        idle(scheduler)


def count_those_held(
    collect: Callable[..., list[Any]], scheduler: AdoptedScheduler
) -> list[ScheduleBatch | None]:
    """A pipeline's requests that were prefilled, and would decode in a turn that is held."""
    batches: list[ScheduleBatch | None] = collect(scheduler)
    if get_parallel().pp_size > 1 and scheduler.inflight.holds_back:
        batches = [*batches, *scheduler.last_mbs]
    return batches


def answer_health_while_frozen(
    is_fully_idle: Callable[..., bool], scheduler: AdoptedScheduler, *args: Any, **kwargs: Any
) -> bool:
    """A health check must not wait for a forward that a pause holds back."""
    if kwargs.get("for_health_check") and scheduler.inflight.is_frozen:
        return False
    return is_fully_idle(scheduler, *args, **kwargs)


def name_the_call(
    sender: SenderWrapper, output: Any, recv_obj: object = None, *args: Any, **kwargs: Any
) -> None:
    """An answer carries its request's id, so that no other caller takes it for theirs."""
    if isinstance(output, BaseReq) and isinstance(recv_obj, BaseReq) and output.rid is None:
        output.rid = recv_obj.rid


def record_launch(
    scheduler: AdoptedScheduler, batch: ScheduleBatch, *args: Any, **kwargs: Any
) -> None:
    scheduler.inflight.before_launch(batch)


def record_taken(
    tokens: list[list[int]],
    processor: AdoptedResultProcessor,
    result: object,
    batch: ScheduleBatch,
) -> None:
    processor.req_to_token_pool.inflight.after_verifying(batch.reqs, tokens)


def read_before_release(pool: AdoptedReqToTokenPool, req: Req) -> None:
    pool.inflight.before_release(req)


def load_adapter(
    load: Callable[..., LoRAUpdateOutput],
    scheduler: AdoptedScheduler,
    recv_req: LoadAdapterRequest,
) -> LoRAUpdateOutput:
    return scheduler.inflight.adapters.load(lambda: load(scheduler, recv_req), recv_req)


def unload_adapter(
    unload: Callable[..., LoRAUpdateOutput],
    scheduler: AdoptedScheduler,
    recv_req: UnloadAdapterRequest,
) -> LoRAUpdateOutput:
    return scheduler.inflight.adapters.unload(lambda: unload(scheduler, recv_req), recv_req)


def extend_output_streamer(get_class: Callable[..., type], scheduler: AdoptedScheduler) -> type:
    return extend(get_class(scheduler))


def follow_to_host(
    engine: AdoptedTransferEngine, transfers: list[L2Transfer], *args: Any, **kwargs: Any
) -> None:
    # the first is of KV; there may be none, and what is copied before there is a controller is
    # of the weights that the server started with
    for transfer in transfers[:1]:
        if (controller := getattr(engine, "inflight", None)) is not None:
            controller.follow_to_host(transfer.host_indices, transfer.device_indices)


def follow_from_host(
    engine: AdoptedTransferEngine, transfers: list[L2Transfer], *args: Any, **kwargs: Any
) -> None:
    for transfer in transfers[:1]:
        if (controller := getattr(engine, "inflight", None)) is not None:
            controller.follow_from_host(transfer.host_indices, transfer.device_indices)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_PROCESSOR = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
)
_SENDER = "sglang.srt.managers.scheduler_components.output_sender.SenderWrapper"
_SPANS = "sglang.srt.utils.weight_versions"
_TRANSFERS = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine"
_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"

HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    # right after the ranks have met, and before what takes longer on one node than on another
    (f"{_SCHEDULER}.init_ipc_channels", meet_other_nodes, HookType.BEFORE),
    (f"{_SCHEDULER}.init_memory_pools", reserve_shadow, HookType.BEFORE),
    (f"{_SCHEDULER}.__init__", create_controller, HookType.AFTER),
    (f"{_SCHEDULER}.get_new_batch_prefill", hold_back_while_draining, HookType.AROUND),
    (f"{_SCHEDULER}.get_next_batch_to_run", hold_the_turn, HookType.AROUND),
    (f"{_SCHEDULER}.on_idle", stay_idle_while_held, HookType.AROUND),
    (f"{_SCHEDULER}._collect_inflight_batches", count_those_held, HookType.AROUND),
    (f"{_SCHEDULER}._add_request_to_queue", enqueue, HookType.BEFORE),
    (f"{_SCHEDULER}._abort_on_queued_limit", keep_accepted, HookType.AROUND),
    (f"{_SCHEDULER}.process_batch_result", label_after_result, HookType.AFTER),
    (f"{_SCHEDULER}.record_weight_version_change", change_label, HookType.REPLACE),
    # where it is defined: SGLang then replaces it in whatever has imported it by name
    (f"{_SPANS}.compute_weight_version_spans", write_spans, HookType.AROUND),
    (f"{_SCHEDULER}._poll_timeout_aborts", stop_clocks_while_frozen, HookType.AROUND),
    (f"{_SENDER}.send_output", name_the_call, HookType.BEFORE),
    (f"{_SCHEDULER}.is_fully_idle", answer_health_while_frozen, HookType.AROUND),
    (f"{_SCHEDULER}.run_batch", record_launch, HookType.BEFORE),
    (f"{_PROCESSOR}._resolve_spec_v2_tokens", record_taken, HookType.AFTER),
    (f"{_SCHEDULER}.load_lora_adapter", load_adapter, HookType.AROUND),
    (f"{_SCHEDULER}.load_lora_adapter_from_tensors", load_adapter, HookType.AROUND),
    (f"{_SCHEDULER}.unload_lora_adapter", unload_adapter, HookType.AROUND),
    (f"{_SCHEDULER}.get_output_streamer_class", extend_output_streamer, HookType.AROUND),
    (
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free",
        read_before_release,
        HookType.BEFORE,
    ),
    (f"{_TRANSFERS}.submit_device_to_host", follow_to_host, HookType.BEFORE),
    (f"{_TRANSFERS}.submit_host_to_device", follow_from_host, HookType.BEFORE),
    (f"{_SAMPLING}.apply_logits_bias", leave_a_token, HookType.AFTER),
    (f"{_SAMPLING}.apply_logits_bias_with_observer", leave_a_token, HookType.AFTER),
]
