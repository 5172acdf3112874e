"""Types that mypy cannot read in SGLang's source.

All other annotations name SGLang's own classes, and mypy follows SGLang's source. SGLang makes
the objects here at run time: ``ServerArgs`` and the namespaces of its runtime context consist of
the classes in its ``arg_groups.fields``. Each context belongs to a process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

from sglang.srt import runtime_context

if TYPE_CHECKING:
    import asyncio

    from sglang.srt import server_args
    from sglang.srt.arg_groups.fields import (
        device,
        disagg,
        exec_,
        lora,
        memory,
        model,
        observability,
        parallel,
        schedule,
        serving,
        spec,
    )
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.disaggregation.base.conn import BaseKVReceiver, BaseKVSender
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.managers import scheduler, tokenizer_manager
    from sglang.srt.managers.io_struct import (
        BatchTokenizedEmbeddingReqInput,
        BatchTokenizedGenerateReqInput,
        LoadLoRAAdapterFromTensorsReqInput,
        LoadLoRAAdapterReqInput,
        ReleaseMemoryOccupationReqInput,
        ResumeMemoryOccupationReqInput,
    )
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    BatchRequest = BatchTokenizedGenerateReqInput | BatchTokenizedEmbeddingReqInput
    LoadAdapterRequest = LoadLoRAAdapterReqInput | LoadLoRAAdapterFromTensorsReqInput
    MemoryRequest = ReleaseMemoryOccupationReqInput | ResumeMemoryOccupationReqInput
    # one end of a request's KV transfer between two servers
    KVConnection = BaseKVSender | BaseKVReceiver

    class ServerArgs(
        server_args.ServerArgs,
        device.Device,
        disagg.Disagg,
        exec_.ExecDllm,
        exec_.ExecGraph,
        exec_.ExecKernel,
        exec_.ExecMoe,
        exec_.ExecOffload,
        lora.Lora,
        memory.Memory,
        parallel.Parallel,
        serving.Serving,
        spec.Spec,
        model.Model,
    ):
        """A server's arguments, before and while they are resolved."""

    class Scheduler(scheduler.Scheduler):
        """A scheduler past its start. Each queue exists only on servers of its mode."""

        device: str
        page_size: int
        max_total_num_tokens: int
        req_to_token_pool: ReqToTokenPool
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator
        tree_cache: UnifiedRadixCache
        disagg_prefill_bootstrap_queue: PrefillBootstrapQueue
        disagg_decode_prealloc_queue: DecodePreallocQueue
        disagg_decode_transfer_queue: DecodeTransferQueue
        # only in the pipeline's loop, one for each microbatch
        running_mbs: list[ScheduleBatch]
        last_mbs: list[ScheduleBatch | None]  # type: ignore[assignment]

    class TokenizerManager(tokenizer_manager.TokenizerManager):
        """A manager past its start. Lives on the front end's event loop."""

        # None until the first call
        event_loop: asyncio.AbstractEventLoop | None
        asyncio_tasks: set[asyncio.Future[Any]]
        model_config: ModelConfig
        model_path: str
        served_model_name: str
        # true: each chunk carries only its new tokens
        incremental_streaming_output: bool

    class Schedule(schedule.Schedule, kw_only=True):
        """Resolved scheduling arguments."""

        mem_fraction_static: float

    class Parallel(parallel.Parallel, kw_only=True):
        """Parallelism: arguments, and members that SGLang derives from them at run time."""

        tp_rank: int  # type: ignore[assignment]
        tp_group: GroupCoordinator  # type: ignore[assignment]
        world_group: GroupCoordinator  # type: ignore[assignment]
        pp_rank: int  # type: ignore[assignment]
        dp_rank: int | None  # type: ignore[assignment]
        attn_tp_rank: int  # type: ignore[assignment]
        attn_cp_rank: int  # type: ignore[assignment]
        attn_dp_enabled: bool  # type: ignore[assignment]
        attn_dp_rank: int  # type: ignore[assignment]

    class Execution(Protocol):
        """A namespace of namespaces."""

        @property
        def features(self) -> exec_.ExecFeatures: ...

        @property
        def deterministic(self) -> exec_.ExecDeterministic: ...

        @property
        def dllm(self) -> exec_.ExecDllm: ...


get_context = runtime_context.get_context
get_resources = runtime_context.get_resources
get_device = cast("Callable[[], device.Device]", runtime_context.get_device)
get_disagg = cast("Callable[[], disagg.Disagg]", runtime_context.get_disagg)
get_exec = cast("Callable[[], Execution]", runtime_context.get_exec)
get_lora = cast("Callable[[], lora.Lora]", runtime_context.get_lora)
get_memory = cast("Callable[[], memory.Memory]", runtime_context.get_memory)
get_model = cast("Callable[[], model.Model]", runtime_context.get_model)
get_observability = cast(
    "Callable[[], observability.Observability]", runtime_context.get_observability
)
get_parallel = cast("Callable[[], Parallel]", runtime_context.get_parallel)
get_schedule = cast("Callable[[], Schedule]", runtime_context.get_schedule)
get_serving = cast("Callable[[], serving.Serving]", runtime_context.get_serving)
get_spec = cast("Callable[[], spec.Spec]", runtime_context.get_spec)
