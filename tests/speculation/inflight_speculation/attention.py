"""Attention of drafting and verifying steps: left out, as is its KV.

In the marker model attention adds nothing, and SGLang's backends for these steps need a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.speculative.draft_utils import DraftBackendFactory


def install() -> None:
    extend = TorchNativeAttnBackend.forward_extend

    def forward_extend(
        backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kw: Any
    ) -> Any:
        mode = batch.forward_mode
        if mode.is_target_verify() or mode.is_draft_extend_v2():
            return torch.zeros_like(q)
        return extend(backend, q, k, v, layer, batch, *args, **kw)

    TorchNativeAttnBackend.forward_extend = forward_extend
    DraftBackendFactory.create_decode_backend = create_steps
    DraftBackendFactory.create_draft_extend_backend = create


def create(factory: DraftBackendFactory) -> TorchNativeAttnBackend:
    return TorchNativeAttnBackend(factory.draft_model_runner)


def create_steps(factory: DraftBackendFactory) -> SimpleNamespace:
    """Return a backend for each step after the first."""
    return SimpleNamespace(
        attn_backends=[create(factory) for _ in range(factory.speculative_num_steps - 1)],
        init_forward_metadata=lambda batch: None,
    )
