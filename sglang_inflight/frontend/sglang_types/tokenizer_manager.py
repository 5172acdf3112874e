"""SGLang's ``TokenizerManager``, the front end's main object, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from sglang_inflight.frontend.sglang_types.lora_registry import LoRARef, LoRARegistry, RWLock
from sglang_inflight.sglang_types.describes import describes
from sglang_inflight.sglang_types.dispatcher import TypeBasedDispatcher
from sglang_inflight.sglang_types.requests import Request

if TYPE_CHECKING:
    import torch


@describes("sglang.srt.multimodal.processors.base_processor.BaseMultimodalProcessor")
class MultimodalProcessor(Protocol):
    def clear_preprocess_cache(self) -> None: ...


@describes("sglang.srt.configs.model_config.ModelConfig")
class ModelConfig(Protocol):
    vocab_size: int
    hidden_size: int
    # in tokens
    context_len: int
    is_multimodal: bool
    dtype: torch.dtype
    # transformers' configuration of the text model
    hf_text_config: Any


@describes("sglang.srt.managers.tokenizer_manager.TokenizerManager")
class TokenizerManager(Protocol):
    # ---- its process ---------------------------------------------------------------
    # None until the first call
    event_loop: asyncio.AbstractEventLoop | None
    asyncio_tasks: set[asyncio.Future[Any]]
    gracefully_exit: bool

    def auto_create_handle_loop(self) -> None: ...
    def set_engine_state_changed_callback(self, callback: Callable[[], None]) -> None: ...

    # ---- requests ------------------------------------------------------------------
    is_pause: bool
    is_pause_cond: asyncio.Condition
    rid_to_state: Mapping[str, Any]
    lora_registry: LoRARegistry
    lora_update_lock: asyncio.Lock
    # name -> id of adapters waiting for the end of their last request
    pending_lora_unloads: dict[str, str]
    # evicted adapters; a request reloads them
    lora_ref_cache: dict[str, LoRARef]
    served_model_name: str
    model_config: ModelConfig
    # true: each chunk carries only its new tokens
    incremental_streaming_output: bool
    # None for a text-only model
    mm_processor: MultimodalProcessor | None

    def generate_request(
        self, obj: Any, request: Any | None = None
    ) -> AsyncIterator[dict[str, Any]]: ...
    async def pause_generation(self, obj: Any) -> None: ...
    async def continue_generation(self, obj: Any) -> None: ...
    def create_abort_task(self, obj: Any) -> Any: ...
    async def load_lora_adapter(self, obj: Any, _: Any | None = None) -> Any: ...
    async def load_lora_adapter_from_tensors(self, obj: Any, _: Any | None = None) -> Any: ...
    async def unload_lora_adapter(self, obj: Any, _: Any | None = None) -> Any: ...
    def abort_request(self, rid: str = "", abort_all: bool = False) -> None: ...
    def _handle_abort_req(self, recv_obj: Request) -> None: ...

    # ---- weights and memory --------------------------------------------------------
    model_path: str
    model_update_lock: RWLock
    # false while the server waits for a checkpoint engine
    initial_weights_loaded: bool

    async def check_weights(
        self, obj: Any
    ) -> tuple[bool, str, list[dict[str, Any]] | None, str | None]: ...
    async def update_weight_version(self, obj: Any) -> None: ...
    def _update_weight_version_if_provided(self, weight_version: str | None) -> None: ...
    async def flush_cache(self, timeout_s: float | None = None) -> Any: ...
    async def release_memory_occupation(self, obj: Any, request: Any | None = None) -> None: ...
    async def resume_memory_occupation(self, obj: Any, request: Any | None = None) -> None: ...
    def is_ready(self) -> bool: ...

    # ---- configuration and messages ------------------------------------------------
    _result_dispatcher: TypeBasedDispatcher

    def config_value(self, name: str) -> Any: ...
    def record_config_updates(self, source: str, **fields: Any) -> None: ...
    def _dispatch_to_scheduler(self, obj: Any) -> None: ...
    async def _async_dispatch_to_scheduler(self, obj: Any) -> None: ...


@describes("sglang.srt.managers.tokenizer_manager.SignalHandler")
class SignalHandler(Protocol):
    tokenizer_manager: TokenizerManager
