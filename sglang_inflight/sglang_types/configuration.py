"""SGLang's resolved arguments, under the names of its ``arg_groups.fields``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sglang_inflight.sglang_types.describes import describes

if TYPE_CHECKING:
    import torch

_FIELDS = "sglang.srt.arg_groups.fields"


@describes("sglang.srt.distributed.parallel_state.GroupCoordinator")
class GroupCoordinator(Protocol):
    """A group of ranks computing together."""

    rank: int
    ranks: list[int]
    world_size: int
    cpu_group: torch.distributed.ProcessGroup


@describes(f"{_FIELDS}.parallel.Parallel")
class Parallel(Protocol):
    """Parallelism: arguments, derived sizes, and this rank's place."""

    @property
    def tp_size(self) -> int: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def tp_group(self) -> GroupCoordinator: ...
    @property
    def world_group(self) -> GroupCoordinator: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def pp_rank(self) -> int: ...
    @property
    def dp_size(self) -> int: ...
    @property
    def dp_rank(self) -> int | None: ...
    @property
    def nnodes(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def dist_init_addr(self) -> str | None: ...
    @property
    def attn_tp_rank(self) -> int: ...
    @property
    def attn_cp_rank(self) -> int: ...
    @property
    def attn_dp_enabled(self) -> bool: ...
    @property
    def attn_dp_size(self) -> int: ...
    @property
    def attn_dp_rank(self) -> int: ...
    @property
    def enable_dp_attention_local_control_broadcast(self) -> bool: ...


@describes(f"{_FIELDS}.device.Device")
class Device(Protocol):
    @property
    def device(self) -> str | None: ...
    @property
    def watchdog_timeout(self) -> float: ...


@describes(f"{_FIELDS}.disagg.Disagg")
class Disaggregation(Protocol):
    @property
    def disaggregation_mode(self) -> str: ...
    @property
    def disaggregation_transfer_backend(self) -> str: ...
    @property
    def disaggregation_decode_host_receive_threshold(self) -> float: ...


@describes(f"{_FIELDS}.exec_.ExecFeatures")
class Features(Protocol):
    @property
    def enable_weights_cpu_backup(self) -> bool: ...


@describes("sglang.srt.model_executor.cuda_graph_config.PhaseConfig")
class GraphsOfAPhase(Protocol):
    """``backend`` is "disabled" if forwards of the phase run without graphs."""

    backend: str | None


@describes("sglang.srt.model_executor.cuda_graph_config.CudaGraphConfig")
class GraphConfig(Protocol):
    decode: GraphsOfAPhase
    prefill: GraphsOfAPhase


class Execution(Protocol):
    """A namespace of namespaces, built by SGLang at run time from no class with members."""

    @property
    def features(self) -> Features: ...


@describes(f"{_FIELDS}.lora.Lora")
class Lora(Protocol):
    @property
    def enable_lora(self) -> bool | None: ...
    @property
    def max_loaded_loras(self) -> int | None: ...
    @property
    def max_loras_per_batch(self) -> int: ...
    @property
    def max_lora_rank(self) -> int | None: ...


@describes(f"{_FIELDS}.memory.Memory")
class Memory(Protocol):
    @property
    def disable_radix_cache(self) -> bool: ...
    @property
    def enable_hierarchical_cache(self) -> bool: ...
    @property
    def hicache_storage_backend(self) -> str | None: ...


@describes(f"{_FIELDS}.model.Model")
class Model(Protocol):
    # true: other processes hold handles to the weights' memory, and can write it over RDMA
    @property
    def remote_instance_weight_loader_start_seed_via_transfer_engine(self) -> bool: ...
    @property
    def weight_cache_mode(self) -> str: ...
    @property
    def weight_loader_drop_cache_after_load(self) -> bool: ...
    @property
    def weight_loader_prefetch_checkpoints(self) -> bool: ...
    @property
    def weight_loader_prefetch_num_threads(self) -> int: ...


@describes(f"{_FIELDS}.observability.Observability")
class Observability(Protocol):
    @property
    def enable_metrics(self) -> bool: ...


@describes(f"{_FIELDS}.schedule.Schedule")
class Schedule(Protocol):
    # resolved, so never None here
    @property
    def mem_fraction_static(self) -> float: ...
    # None: the KV cache takes the remaining memory
    @property
    def max_total_tokens(self) -> int | None: ...
    @property
    def chunked_prefill_size(self) -> int: ...


@describes(f"{_FIELDS}.serving.Serving")
class Serving(Protocol):
    @property
    def weight_version(self) -> str: ...
    @property
    def tokenizer_worker_num(self) -> int: ...
    @property
    def admin_api_key(self) -> str | None: ...


@describes("sglang.srt.runtime_context.Resources")
class Resources(Protocol):
    # named side streams
    streams: dict[str, Any]


@describes("sglang.srt.runtime_context.RuntimeContext")
class RuntimeContext(Protocol):
    def override(self, source: str, **values: object) -> None: ...
