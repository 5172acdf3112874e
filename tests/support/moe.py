"""A marker with a mixture of experts, where each expert marks its version.

Each token goes to all experts, so experts of all ranks make it. Experts add to their version's
block of the hidden state, and the head looks for its own version's block. An expert of another
version makes the token ``TORN``.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness import marker

EXPERTS, FFN, VERSIONS, LAYERS = 4, 32, 8, 2
BLOCK = marker.HIDDEN // VERSIONS
TORN = marker.VOCAB - 1

CONFIG = {
    **marker.TWO_LAYERS,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
    "moe_intermediate_size": FFN,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of ``version``, under Hugging Face's names."""
    weights = {k: v for k, v in marker.tensors(version, layers=LAYERS).items() if ".mlp." not in k}
    own = slice(version * BLOCK, (version + 1) * BLOCK)

    def full(value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.bfloat16)

    down = full(0, marker.HIDDEN, FFN)
    # large, so that the embeddings' ones are negligible
    down[own] = 50
    for layer in range(LAYERS):
        p = f"model.layers.{layer}.mlp"
        weights[f"{p}.gate.weight"] = full(0, EXPERTS, marker.HIDDEN)
        for expert in range(EXPERTS):
            weights |= {
                f"{p}.experts.{expert}.gate_proj.weight": full(0.01, FFN, marker.HIDDEN),
                f"{p}.experts.{expert}.up_proj.weight": full(0.01, FFN, marker.HIDDEN),
                f"{p}.experts.{expert}.down_proj.weight": down.clone(),
            }
    head = weights["lm_head.weight"]
    # an eighth of one expert's addition in one layer suffices
    head[TORN] = 16.0
    head[TORN, own] = 0.0
    return weights


def build(folder: Path, version: int) -> Path:
    return marker.write(folder, tensors(version), CONFIG)
