"""A hierarchical cache without an accelerator, with ``--hicache-io-backend direct``.

The cache's second tier is host memory. SGLang pins it and copies with its own kernels. Here both
tiers are host memory: nothing is pinned, and torch copies.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.pool_host import common, mha

from sglang_inflight.sglang_types.runtime_context import get_memory


def keep_a_host_tier() -> None:
    """Patch SGLang's host tier. Call after the model is loaded, before its cache is created."""
    if not get_memory().enable_hierarchical_cache:
        return
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    mha.transfer_kv_direct = _copy


def _allocate(dims: tuple[int, ...], *, dtype: torch.dtype, device: str, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype, device=device)


def _copy(
    *,
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy tokens between tiers. Indices count tokens, whatever the page size."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
