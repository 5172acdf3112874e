"""Do an adapter's weights fit the buffers that they are copied to when a request needs them?

SGLang finds out when the request runs, and there a shape that is wrong ends the scheduler.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from sglang_inflight.scheduler.upstream.lora import LoRAManager, LoRAMemoryPool


def why_it_does_not_fit(manager: LoRAManager, lora_id: str) -> str | None:
    """Tried with SGLang's own code on buffers of one slot that have shapes and no memory."""
    pool = _without_memory(manager.memory_pool)
    try:
        pool.load_lora_weight_to_buffer(
            lora_id,
            0,
            manager.loras[lora_id],
            manager.lora_modules,
            manager.embed_tokens_module,
            manager.lm_head_module,
        )
    except Exception as error:
        return f"its weights do not fit the model: {str(error) or type(error).__name__}"
    return None


def _without_memory(pool: LoRAMemoryPool) -> LoRAMemoryPool:
    trial = copy.copy(pool)
    for name in ("A_buffer", "B_buffer"):
        of_layers: dict[str, list[Any]] = getattr(pool, name)
        setattr(trial, name, {key: [_one_slot(b) for b in of] for key, of in of_layers.items()})
    for name in (
        "embedding_A_buffer",
        "embedding_B_buffer",
        "lm_head_A_buffer",
        "lm_head_B_buffer",
        "new_embeddings_buffer",
    ):
        buffers: dict[str, Any] = getattr(pool, name)
        setattr(trial, name, {key: _one_slot(buffer) for key, buffer in buffers.items()})
    # nothing is copied from the host
    trial.pin_memory_available = False
    return trial


def _one_slot(buffer: torch.Tensor) -> torch.Tensor:
    return torch.empty((1, *buffer.shape[1:]), dtype=buffer.dtype, device="meta")
