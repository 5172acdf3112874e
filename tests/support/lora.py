"""LoRA adapters with a token of their own each, so that a token identifies its adapter."""

from __future__ import annotations

import base64
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from harness import marker
from harness.marker import HEAD_DIM, HEADS, HIDDEN

RANK = 4
# tokens of adapters, apart from those of the weights' versions
FIRST = marker.FIRST + 50
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["o_proj"]}

_LAYER = "base_model.model.model.layers.0.self_attn"

Weights = dict[str, torch.Tensor]


def build_model(folder: Path) -> Path:
    """Build the marker's version 0 with a token for each adapter.

    An adapter makes one dimension of the hidden state the largest, and ``lm_head`` has a row for
    each dimension. The adapter is in the first layer, so no adapter's KV affects a token.
    """
    weights = marker.tensors(0)
    for number in range(HIDDEN):
        weights["lm_head.weight"][FIRST + number, number] = 4.0
    return marker.write(folder, weights)


def token(number: int) -> int:
    return FIRST + number


def tensors(number: int, *, module: str = "o_proj") -> Weights:
    """Return an adapter: every greedy step then yields ``token(number)``."""
    up = torch.zeros(HIDDEN, RANK, dtype=torch.bfloat16)
    up[number] = 1.0
    down = torch.ones(RANK, HEADS * HEAD_DIM, dtype=torch.bfloat16)
    return _named(down, up, module)


def uniform(weight: float, *, rank: int = RANK) -> Weights:
    """Return an adapter to add ``weight`` times the sum of its input to the hidden state."""
    down = torch.ones(rank, HEADS * HEAD_DIM, dtype=torch.bfloat16)
    return _named(down, torch.full((HIDDEN, rank), weight, dtype=torch.bfloat16), "o_proj")


def _named(down: torch.Tensor, up: torch.Tensor, module: str) -> Weights:
    return {
        f"{_LAYER}.{module}.lora_A.weight": down,
        f"{_LAYER}.{module}.lora_B.weight": up,
    }


def write(folder: Path, weights: Weights, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


def tensor_body(weights: Weights, *, ranks: int = 1, **config: Any) -> dict[str, Any]:
    payload = base64.b64encode(pickle.dumps(weights)).decode()
    return {"config_dict": CONFIG | config, "serialized_named_tensors": [payload] * ranks}


def spans_by_tokens(tokens: list[int], name: str, versions: dict[int, str]) -> list[Any]:
    """Return the spans shown by the tokens. ``versions`` are by adapter number."""
    spans: list[Any] = []
    start = 0
    for made, run in itertools.groupby(tokens):
        end = start + len(list(run))
        version = versions[made - FIRST]
        spans.append({"adapter": name, "version": version, "start": start, "end": end})
        start = end
    return spans
