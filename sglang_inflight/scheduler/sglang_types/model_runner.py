"""A model, and its runner and workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sglang_inflight.scheduler.sglang_types.lora import LoRAManager
from sglang_inflight.sglang_types.describes import describes

if TYPE_CHECKING:
    import torch


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
