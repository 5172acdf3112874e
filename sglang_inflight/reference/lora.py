"""Adapters where there is no accelerator, with ``--lora-backend torch_native``.

SGLang pins the memory of what it copies to a device. Here is none to copy to, and torch
refuses to pin.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_inflight.sglang_types.runtime_context import get_lora


class _WithoutPinning:
    """``torch``, as the modules that pin memory see it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)

    def zeros(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def serve_adapters_without_pinning() -> None:
    """Called when the model is loaded, which is before its adapters are."""
    if not get_lora().enable_lora:
        return
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    layers.torch = torch_backend.torch = _WithoutPinning()
    torch.Tensor.pin_memory = lambda tensor, *args: tensor  # type: ignore[method-assign]
