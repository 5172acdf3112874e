"""Adapters of one rank: all in the host's memory, and the ones in use on the device too."""

from __future__ import annotations

from typing import Any, Protocol

from sglang_inflight.sglang_types.describes import describes


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
