"""The chain, quantized by ``tests/toy_quantization``, with scales for KV.

SGLang's Llama hands a quantization's method to its attention layers, and its Qwen3 does not.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness import marker
from tests.support import chain, toy_quantization

CONFIG = {
    **toy_quantization.CONFIG,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
}
ENV = toy_quantization.ENV
# Llama has no norms for queries and keys, and attention must be as certain without
_STEEPER = 16.0


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of ``version``, under Hugging Face's names."""
    weights = chain.tensors(version)
    for layer in range(chain.LAYERS):
        for of in "qk":
            del weights[f"model.layers.{layer}.self_attn.{of}_norm.weight"]
            weights[f"model.layers.{layer}.self_attn.{of}_proj.weight"] *= _STEEPER
    toy_quantization.quantize_layers(weights)
    return weights | scales(1.0)


def scales(value: float) -> dict[str, torch.Tensor]:
    """Return scales for KV. Only some attention backends use them, so a model is served with 1."""
    return {
        f"model.layers.{layer}.self_attn.{of}_scale": torch.tensor(value)
        for layer in range(chain.LAYERS)
        for of in "kv"
    }


def build(folder: Path, version: int) -> Path:
    return marker.write(folder, tensors(version), CONFIG)
