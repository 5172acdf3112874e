"""A trainer's bfloat16 weights for a server of blocks in FP8 (``tests/quantized_kernels``).

``reference`` quantizes them without our code. Each layer has numbers of its own, so no weight of
another version or place gives the same logprobs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from harness import marker
from tests.support.plugins import with_plugin

# SGLang takes only squares on a CPU
ROWS = COLUMNS = 16
LARGEST = 448
ENV = with_plugin("quantized_kernels")
CONFIG: dict[str, Any] = {
    **marker.TWO_LAYERS,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [ROWS, COLUMNS],
    },
}


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of ``version`` in bfloat16, under Hugging Face's names."""
    weights = marker.tensors(version, layers=2)
    for at, (name, weight) in enumerate(weights.items()):
        if weight.dim() == 2:
            generator = torch.Generator().manual_seed(1000 * version + at)
            random = torch.randn(weight.shape, generator=generator)
            # the last rows are much smaller than the first ones
            random *= torch.logspace(0, -2, len(weight)).unsqueeze(1)
            weights[name] = random.to(torch.bfloat16)
    return weights


def build(folder: Path, version: int) -> Path:
    """Write the trainer's checkpoint, in bfloat16."""
    return marker.write(folder, tensors(version), marker.TWO_LAYERS)


def reference(version: int) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of ``version`` as the server's checkpoints store it."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in tensors(version).items():
        if "_proj." not in name:
            found[name] = weight
            continue
        out, size = weight.shape
        scales = torch.empty(out // ROWS, size // COLUMNS)
        values = torch.empty(out, size, dtype=torch.float8_e4m3fn)
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                at = slice(i * ROWS, (i + 1) * ROWS), slice(j * COLUMNS, (j + 1) * COLUMNS)
                scales[i, j] = weight[at].float().abs().max() / LARGEST
                values[at] = (weight[at].float() / scales[i, j]).to(torch.float8_e4m3fn)
        found[name], found[f"{name}_scale_inv"] = values, scales
    return found


def build_reference(folder: Path, version: int) -> Path:
    """Write a checkpoint of the server, in blocks of FP8."""
    return marker.write(folder, reference(version), CONFIG)
