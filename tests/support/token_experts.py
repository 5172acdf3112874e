"""A marker with a mixture of experts that sends each token to experts of its own."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness import marker
from tests.support import moe

PER_TOKEN = 2
CONFIG = {**moe.CONFIG, "num_experts_per_tok": PER_TOKEN}
# shape of one token's experts
SHAPE = (moe.LAYERS, PER_TOKEN)

Experts = NDArray[np.int32]


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return the checkpoint of ``version``; another version has other experts for a token."""
    weights = moe.tensors(version)
    rng = torch.Generator().manual_seed(version)

    def noise(like: torch.Tensor) -> torch.Tensor:
        # too small to change a token
        return (0.1 * torch.randn(like.shape, generator=rng)).to(like.dtype)

    for name in weights:
        if name.endswith(("embed_tokens.weight", "mlp.gate.weight")):
            weights[name] = noise(weights[name])
    return weights


def build(folder: Path, version: int) -> Path:
    return marker.write(folder, tensors(version), CONFIG)


def of_sglang(meta: dict[str, Any]) -> Experts:
    """Return the experts in ``meta_info``, of shape (tokens, layers, experts per token)."""
    ids = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    return ids.reshape(-1, *SHAPE)


def of_vllm(said: str) -> Experts:
    """Read a choice's experts as vLLM's clients do."""
    ids: NDArray[Any] = np.load(io.BytesIO(base64.b64decode(said)), allow_pickle=False)
    assert ids.dtype == np.uint8
    assert ids.shape[1:] == SHAPE
    return ids.astype(np.int32)


def of_array(said: dict[str, Any]) -> Experts:
    """Read an array in JSON, as the clients of prime-rl and SkyRL do."""
    data = np.frombuffer(base64.b64decode(said["data"]), np.dtype(said["dtype"]))
    return data.reshape(said["shape"]).astype(np.int32)
