"""Parts of SGLang that need an accelerator, made to work with host memory alone.

**Hierarchical cache**, with ``--hicache-io-backend direct``: its second tier is host memory. SGLang
pins it and copies with its own kernels. Here both tiers are host memory: nothing is pinned, and
torch copies.

**LoRA adapters**, with ``--lora-backend torch_native``: SGLang pins memory before copying it to a
device. Without a device torch refuses to pin.

**KV transfer** from a prefill server to a decode server: mooncake transfers KV over TCP. SGLang's
prefill side copies page indices into pinned memory, and waits for CUDA's events. Without a device
the indices are complete at once.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host import common, mha

from sglang_inflight.sglang_types import get_disagg, get_lora, get_memory

# early sending of a prefix needs an event; without it all KV is sent together
EARLY_SEND = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
# a sender without this attribute counts as false
PINNED_INDICES = "supports_host_tensor_indices"


def keep_a_host_tier() -> None:
    """Patch SGLang's host tier. Call after the model is loaded, before its cache is created."""
    if not get_memory().enable_hierarchical_cache:
        return
    allocate: Any = _allocate
    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
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


class _WithoutPinning:
    """Stand-in for ``torch`` in SGLang's modules, ignoring ``pin_memory``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)

    def zeros(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def serve_adapters_without_pinning() -> None:
    """Patch SGLang's LoRA modules. Call after the model is loaded, before its adapters."""
    if not get_lora().enable_lora:
        return
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    patched: Any = _WithoutPinning()
    layers.torch = torch_backend.torch = patched
    torch.Tensor.pin_memory = lambda tensor, *args: tensor  # type: ignore[method-assign]


def send_without_events() -> None:
    """Patch SGLang's prefill side. Call after the model is loaded, before any request."""
    disagg = get_disagg()
    if disagg.disaggregation_mode != "prefill":
        return
    os.environ.setdefault(EARLY_SEND, "false")
    if disagg.disaggregation_transfer_backend == "mooncake":
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

        setattr(MooncakeKVSender, PINNED_INDICES, False)
