"""A small model with random weights: at temperature 1 nearly each token may come."""

from __future__ import annotations

from pathlib import Path

import torch

from harness import marker


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return the marker's tensors with random contents. Each version has its own."""
    draw = torch.Generator().manual_seed(version)
    return {
        name: torch.ones_like(tensor)
        if "norm" in name
        else (0.2 * torch.randn(tensor.shape, generator=draw)).to(tensor.dtype)
        for name, tensor in marker.tensors(version, layers=2).items()
    }


def build(folder: Path, version: int) -> Path:
    return marker.write(folder, tensors(version), marker.TWO_LAYERS)
