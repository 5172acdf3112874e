"""The chain, quantized by an out-of-tree method (``tests/toy_quantization``).

A checkpoint has int8 and scales. ``unquantized`` is the model whose server quantizes bfloat16
itself, with ``ONLINE``.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness import marker
from tests.support import chain
from tests.support.plugins import with_plugin
from tests.toy_quantization.inflight_toy_quantization import NAME, quantize

CONFIG = {**marker.TWO_LAYERS, "quantization_config": {"quant_method": NAME}}
ENV = with_plugin("toy_quantization")
ONLINE = ("--quantization", NAME)


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of ``version``, under Hugging Face's names."""
    weights = chain.tensors(version)
    quantize_layers(weights)
    return weights


def quantize_layers(weights: dict[str, torch.Tensor]) -> None:
    """Replace the weights of linear layers and experts by int8, and add a scale [out, 1] each."""
    for name in [name for name in weights if "_proj." in name]:
        weights[name], weights[f"{name}_scale"] = quantize(weights[name])


def build(folder: Path, version: int) -> Path:
    return marker.write(folder, tensors(version), CONFIG)


def build_unquantized(folder: Path, version: int) -> Path:
    return marker.write(folder, chain.tensors(version), marker.TWO_LAYERS)
