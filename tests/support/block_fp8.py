"""The chain in FP8 with a scale for each block, served by SGLang's own method on a CPU.

The plugin ``tests/quantized_kernels`` multiplies. Two more forms are for SGLang's other methods:
``build_unquantized`` for ``ONLINE``, where the server quantizes bfloat16 itself, and ``build_int8``
for int8 with a scale for each output.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness import marker
from tests.support import chain, toy_quantization
from tests.support.plugins import with_plugin

# each part of a fused layer is whole blocks, also on one rank of two
BLOCK = 16
CONFIG = {
    **marker.TWO_LAYERS,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
}
INT8_CONFIG = {**marker.TWO_LAYERS, "quantization_config": {"quant_method": "w8a8_int8"}}
ENV = with_plugin("quantized_kernels")
ONLINE = ("--quantization", "fp8")
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of ``version``, under Hugging Face's names."""
    weights = chain.tensors(version)
    for name in [name for name in weights if "_proj." in name]:
        weights[name], weights[f"{name}_scale_inv"] = in_blocks(weights[name])
    return weights


def in_blocks(weight: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``weight`` in FP8, and a float32 scale for each ``block`` x ``block`` elements."""
    blocks = weight.float().unflatten(0, (-1, block)).unflatten(2, (-1, block))
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-6) / _LARGEST
    quantized = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return quantized.reshape(weight.shape), scale


def build(folder: Path, version: int) -> Path:
    return marker.write(folder, tensors(version), CONFIG)


def build_unquantized(folder: Path, version: int) -> Path:
    return marker.write(folder, chain.tensors(version), marker.TWO_LAYERS)


def build_int8(folder: Path, version: int) -> Path:
    return marker.write(folder, toy_quantization.tensors(version), INT8_CONFIG)
