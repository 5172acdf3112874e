"""A model with its runner, workers, layers and adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sglang_inflight.sglang_types.describes import describes

if TYPE_CHECKING:
    import torch

_UNQUANT = "sglang.srt.layers.quantization.unquant"


@describes(f"{_UNQUANT}.UnquantizedFusedMoEMethod")
class FusedMoEMethod(Protocol):
    """Attributes read by name, because other layers' methods do not have them."""

    use_flashinfer_trtllm_moe: bool
    w13_swiglu_interleaved: bool


@describes("sglang.srt.model_executor.model_runner_components.weight_updater.LocalSerializedTensor")
class SerializedTensor(Protocol):
    # one payload per tensor-parallel rank
    values: list[Any]


@describes("sglang.srt.lora.lora.LoRALayer")
class LoRALayer(Protocol):
    # in the host's memory
    weights: dict[str, Any]


@describes("sglang.srt.lora.lora.LoRAAdapter")
class LoRAAdapter(Protocol):
    config: Any
    scaling: float
    layers: list[LoRALayer]
    embedding_layers: dict[str, Any]
    added_tokens_embeddings: dict[str, Any]


@describes("sglang.srt.lora.mem_pool.LoRAMemoryPool")
class LoRAMemoryPool(Protocol):
    """Buffers by module name. The first dimension of each is the slot."""

    A_buffer: dict[str, list[Any]]
    B_buffer: dict[str, list[Any]]
    embedding_A_buffer: dict[str, Any]
    embedding_B_buffer: dict[str, Any]
    lm_head_A_buffer: dict[str, Any]
    lm_head_B_buffer: dict[str, Any]
    new_embeddings_buffer: dict[str, Any]

    def load_lora_weight_to_buffer(
        self,
        uid: str,
        buffer_id: int,
        lora_adapter: Any,
        lora_modules: list[dict[str, Any]],
        lora_embed_tokens_module: Any | None,
        lora_lm_head_module: Any | None,
    ) -> None: ...


@describes("sglang.srt.managers.io_struct.LoRAUpdateOutput")
class LoRAUpdateOutput(Protocol):
    success: bool
    error_message: str | None


@describes("sglang.srt.lora.lora_manager.LoRAManager")
class LoRAManager(Protocol):
    # by adapter id
    lora_refs: dict[str, Any]
    configs: dict[str, Any]
    loras: dict[str, LoRAAdapter]
    memory_pool: LoRAMemoryPool
    # one dict of modules by name for each layer
    lora_modules: list[dict[str, Any]]
    embed_tokens_module: Any | None
    lm_head_module: Any | None
    attn_dp_enabled: bool
    enable_lora_overlap_loading: bool | None

    def validate_lora_batch(self, lora_ids: set[str | None]) -> bool: ...
    def unload_lora_adapter(self, lora_ref: Any) -> LoRAUpdateOutput: ...
    def create_lora_update_result(
        self, success: bool, error_message: str = ""
    ) -> LoRAUpdateOutput: ...


@describes("sglang.srt.mem_cache.events.LoRANameTable")
class LoRANameTable(Protocol):
    """The names of adapters in KV cache events."""

    def register(self, *, lora_id: str, lora_name: str) -> None: ...


@describes("sglang.srt.configs.model_config.ModelConfig")
class ModelConfig(Protocol):
    model_path: str
    revision: str | None
    # Hugging Face configurations of the whole model, and of its language model
    hf_config: Any
    hf_text_config: Any


@describes("sglang.srt.configs.load_config.LoadConfig")
class LoadConfig(Protocol):
    download_dir: str | None


@describes("sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater")
class WeightUpdater(Protocol):
    # user loaders, by load_format: an import path
    custom_weight_loaders: dict[str, Any]


@describes("sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter")
class MemorySaver(Protocol):
    # false: pause and resume do nothing
    @property
    def enabled(self) -> bool: ...
    def pause(self, tag: str) -> None: ...
    def resume(self, tag: str) -> None: ...


@describes("sglang.srt.model_executor.model_runner.ModelRunner")
class ModelRunner(Protocol):
    device: str
    gpu_id: int
    model: torch.nn.Module
    model_config: ModelConfig
    load_config: LoadConfig
    weight_updater: WeightUpdater
    # one of many classes, with different names of buffers
    token_to_kv_pool: Any
    # GiB free before the model was loaded
    pre_model_load_memory: float
    # None without --enable-lora
    lora_manager: LoRAManager | None

    def update_model_fields(
        self,
        new_model: torch.nn.Module,
        *,
        model_path: str,
        load_format: str,
        load_config: LoadConfig,
    ) -> None: ...


@describes("sglang.srt.managers.tp_worker.TpModelWorker")
class TpModelWorker(Protocol):
    @property
    def model_runner(self) -> ModelRunner: ...
    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]: ...


@describes("sglang.srt.speculative.base_spec_worker.BaseSpecWorker")
class DraftWorker(Protocol):
    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]: ...


@describes("sglang.srt.observability.metrics_collector.SchedulerMetricsCollector")
class MetricsCollector(Protocol):
    def observe_weight_load(self, duration_seconds: float, source: str) -> None: ...


@describes("sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager")
class SchedulerWeightUpdaterManager(Protocol):
    # released kinds of memory
    offload_tags: set[str]
    memory_saver_adapter: MemorySaver
    # None without metrics on this rank
    metrics_collector: MetricsCollector | None

    def _select_runners(self, selector: str = "all") -> list[tuple[str, ModelRunner]]: ...
