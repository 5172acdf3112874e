"""LoRA adapters without an accelerator, with ``--lora-backend torch_native``.

SGLang pins memory before copying it to a device. Without a device torch refuses to pin.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_inflight.sglang_types.runtime_context import get_lora


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

    layers.torch = torch_backend.torch = _WithoutPinning()
    torch.Tensor.pin_memory = lambda tensor, *args: tensor  # type: ignore[method-assign]
