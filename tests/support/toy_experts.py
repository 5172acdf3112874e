"""The chain with a mixture of experts, quantized by ``tests/toy_quantization``.

Each token goes to all experts. They are alike, and without one of them the mark is too small.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness import marker
from tests.support import chain, moe, toy_quantization

CONFIG = {**moe.CONFIG, "quantization_config": toy_quantization.CONFIG["quantization_config"]}
ENV = toy_quantization.ENV


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of ``version``, under Hugging Face's names."""
    weights = unquantized(version)
    toy_quantization.quantize_layers(weights)
    return weights


def unquantized(version: int) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of ``version`` in bfloat16, for a server that quantizes."""
    weights = chain.tensors(version)
    for layer in range(chain.LAYERS):
        p = f"model.layers.{layer}.mlp"
        inputs = [weights.pop(f"{p}.{name}_proj.weight")[: moe.FFN] for name in ("gate", "up")]
        outputs = weights.pop(f"{p}.down_proj.weight")[:, : moe.FFN]
        weights[f"{p}.gate.weight"] = torch.zeros(moe.EXPERTS, marker.HIDDEN, dtype=torch.bfloat16)
        for expert in range(moe.EXPERTS):
            for name, weight in zip(("gate", "up", "down"), (*inputs, outputs), strict=True):
                weights[f"{p}.experts.{expert}.{name}_proj.weight"] = weight.clone()
    return weights


def build(folder: Path, version: int) -> Path:
    return marker.write(folder, tensors(version), CONFIG)


def build_unquantized(folder: Path, version: int) -> Path:
    return marker.write(folder, unquantized(version), moe.CONFIG)
