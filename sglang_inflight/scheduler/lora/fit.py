"""Checks that an adapter's weights fit the device's buffers, when it is loaded.

SGLang copies them when a request runs, and a wrong shape then ends the scheduler.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.lora.mem_pool import LoRAMemoryPool

Tensors = dict[str, torch.Tensor]


def why_it_does_not_fit(manager: LoRAManager, lora_id: str) -> str | None:
    """Return why the adapter does not fit, or None.

    The check runs SGLang's own copy on meta tensors: shapes without contents. A large adapter
    takes no longer than a small one, so the scheduler's loop may wait for it.
    """
    pool = _shape_of_pool(manager.memory_pool)
    try:
        pool.load_lora_weight_to_buffer(
            lora_id,
            0,
            _shape_of_adapter(manager.loras[lora_id]),
            manager.lora_modules,
            manager.embed_tokens_module,
            manager.lm_head_module,
        )
    except Exception as error:
        return f"its weights do not fit the model: {str(error) or type(error).__name__}"
    return None


def _shape_of_adapter(adapter: LoRAAdapter) -> Any:
    return SimpleNamespace(
        config=adapter.config,
        scaling=adapter.scaling,
        layers=[
            SimpleNamespace(weights=_shapes_of(layer.weights), pinned_weights={})
            for layer in adapter.layers
        ],
        embedding_layers=_shapes_of(adapter.embedding_layers),
        pinned_embedding_layers={},
        added_tokens_embeddings=_shapes_of(adapter.added_tokens_embeddings),
        pinned_added_tokens_embeddings={},
    )


def _shape_of_pool(pool: LoRAMemoryPool) -> LoRAMemoryPool:
    """Return a copy of ``pool`` with meta buffers of one slot."""
    trial = copy.copy(pool)
    for name in ("A_buffer", "B_buffer"):
        of_layers: dict[str, list[torch.Tensor]] = getattr(pool, name)
        setattr(trial, name, {key: [_one_slot(b) for b in of] for key, of in of_layers.items()})
    for name in (
        "embedding_A_buffer",
        "embedding_B_buffer",
        "lm_head_A_buffer",
        "lm_head_B_buffer",
        "new_embeddings_buffer",
    ):
        buffers: Tensors = getattr(pool, name)
        setattr(trial, name, {key: _one_slot(buffer) for key, buffer in buffers.items()})
    return trial


def _shapes_of(tensors: Tensors) -> Tensors:
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def _one_slot(buffer: torch.Tensor) -> torch.Tensor:
    return torch.empty((1, *buffer.shape[1:]), dtype=buffer.dtype, device="meta")
