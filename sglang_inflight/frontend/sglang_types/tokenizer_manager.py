"""SGLang's ``TokenizerManager`` and the objects that hold it: ``Engine``, OpenAI handlers.

All of them live on one event loop, the front end's.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from sglang_inflight.sglang_types.describes import describes
from sglang_inflight.sglang_types.requests import Request, TypeBasedDispatcher
from sglang_inflight.sglang_types.server_args import ServerArgs

if TYPE_CHECKING:
    import torch


@describes("sglang.srt.managers.communicator.FanOutCommunicator")
class FanOutCommunicator(Protocol):
    """Sender of one kind of call. ``_fan_out`` is the number of answering replicas."""

    _fan_out: int
    _queueing_lock: asyncio.Lock
    _send: Callable[[Any], None]


@describes("sglang.srt.utils.aio_rwlock.RWLock")
class RWLock(Protocol):
    _cond: asyncio.Condition

    async def acquire_writer(self) -> None: ...
    async def release_writer(self) -> None: ...
    @property
    def writer_lock(self) -> AbstractAsyncContextManager[None]: ...


@describes("sglang.srt.utils.common.ConcurrentCounter")
class ConcurrentCounter(Protocol):
    def value(self) -> int: ...
    async def increment(self, n: int = 1, notify_all: bool = True) -> None: ...
    async def decrement(self, n: int = 1, notify_all: bool = True) -> None: ...
    async def wait_for_zero(self) -> None: ...


@describes("sglang.srt.lora.lora_registry.LoRARef")
class LoRARef(Protocol):
    lora_id: str
    lora_name: str | None
    lora_path: str | None


@describes("sglang.srt.managers.io_struct.LoRAUpdateOutput")
class AdapterAnswer(Protocol):
    """Answer to loading and unloading an adapter."""

    success: bool
    error_message: str | None
    loaded_adapters: dict[str, Any] | None


@describes("sglang.srt.lora.lora_registry.LoRARegistry")
class LoRARegistry(Protocol):
    # adapter's id -> counter of requests
    _counters: dict[str, ConcurrentCounter]
    # name -> adapter, the most recently used last
    _registry: OrderedDict[str, Any]
    _registry_lock: RWLock

    async def lru_lora_name(self, exclude_pinned: bool = False) -> str | None: ...
    async def unregister(self, lora_name: str) -> str: ...
    def get_all_adapters(self) -> dict[str, LoRARef]: ...


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
    server_args: ServerArgs

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


@describes("sglang.srt.entrypoints.engine.Engine")
class Engine(Protocol):
    loop: asyncio.AbstractEventLoop
    server_args: ServerArgs

    def _serialize_tensors_per_rank(self, tensors: Any, load_format: str | None) -> list[bytes]: ...

    # None on every node but the first
    @property
    def tokenizer_manager(self) -> TokenizerManager | None: ...


@describes("sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase")
class OpenAIServing(Protocol):
    tokenizer_manager: TokenizerManager

    def _parse_model_parameter(self, model: str) -> tuple[str, str | None]: ...
    async def handle_request(self, request: Any, raw_request: Any) -> Any: ...
