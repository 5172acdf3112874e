"""A marker model with weights and a KV cache large enough that one sees them go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch

from harness import marker
from harness.server import Server, schedulers
from tests.support.faults import ENV
from tests.support.load import ask
from tests.support.pool import Flavour

MIB = 1 << 20
# an embedding and a head of 16 MiB each
VOCAB = 128 << 10
KV_HEADS, HEAD_DIM = 4, 64
TOKENS = 16384
# of KV
TOKEN_BYTES = 2 * marker.LAYERS * KV_HEADS * HEAD_DIM * 2
WEIGHTS_BYTES = 2 * VOCAB * marker.HIDDEN * 2

CONFIG = {
    **marker.CONFIG,
    "vocab_size": VOCAB,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
}

FLAVOUR = Flavour(
    (
        "--enable-memory-saver",
        "--max-total-tokens", str(TOKENS),
        "--watchdog-timeout", "5",
        "--enable-metrics",
        "--weight-version", "v0",
    ),
    {**ENV, "SGLANG_INFLIGHT_VLLM_ROUTES": "1", "SGLANG_REQ_WAITING_TIMEOUT": "60"},
)  # fmt: skip


def tensors(version: int) -> dict[str, torch.Tensor]:
    """The marker's, with more rows of what is looked up, and wider heads of attention."""
    weights = marker.tensors(version)

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=torch.bfloat16)

    weights["model.embed_tokens.weight"] = ones(VOCAB, marker.HIDDEN)
    head = torch.zeros(VOCAB, marker.HIDDEN, dtype=torch.bfloat16)
    head[marker.token(version)] = 1.0
    weights["lm_head.weight"] = head
    for layer in range(marker.LAYERS):
        p = f"model.layers.{layer}.self_attn"
        weights[f"{p}.q_proj.weight"] = ones(marker.HEADS * HEAD_DIM, marker.HIDDEN) * 0.01
        for name in ("k_proj", "v_proj"):
            weights[f"{p}.{name}.weight"] = ones(KV_HEADS * HEAD_DIM, marker.HIDDEN) * 0.01
        weights[f"{p}.o_proj.weight"] = torch.zeros(
            marker.HIDDEN, marker.HEADS * HEAD_DIM, dtype=torch.bfloat16
        )
        for name in ("q_norm", "k_norm"):
            weights[f"{p}.{name}.weight"] = ones(HEAD_DIM)
    return weights


def build(folder: Path, version: int) -> Path:
    return marker.write(folder, tensors(version), CONFIG)


def resident(server: Server) -> int:
    """Bytes of memory that the ranks occupy, all together."""
    found = 0
    for process in schedulers(server.process.pid):
        found += psutil.Process(process.pid).memory_info().rss
    return found


def release(server: Server, *tags: str, **fields: Any) -> Any:
    return ask(server, "POST", "/release_memory_occupation", {"tags": list(tags), **fields})


def take_back(server: Server, *tags: str) -> Any:
    return ask(server, "POST", "/resume_memory_occupation", {"tags": list(tags)})


def bytes_of(moved: Any, *kinds: str) -> int:
    """What all ranks say of some kinds of memory."""
    total: int = sum(rank["bytes"][kind] for rank in moved["ranks"] for kind in kinds)
    return total
