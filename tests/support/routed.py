"""A small mixture of experts with random weights: each token takes its own routes.

Every version has weights of its own, so tokens, log-probabilities and routes tell versions apart.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness import marker

EXPERTS, PER_TOKEN, FFN, LAYERS = 16, 2, 32, 3

CONFIG = {
    **marker.CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": PER_TOKEN,
    "moe_intermediate_size": FFN,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "torch_dtype": "float32",
}


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return the whole float32 checkpoint of ``version``, under Hugging Face's names."""
    generator = torch.Generator().manual_seed(version)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    hidden, ones = marker.HIDDEN, torch.ones
    weights = {
        # 1 on average per element, as behind a norm
        "model.embed_tokens.weight": noise(marker.VOCAB, hidden) * hidden**0.5,
        "model.norm.weight": ones(hidden),
        "lm_head.weight": noise(marker.VOCAB, hidden),
    }
    for layer in range(LAYERS):
        p = f"model.layers.{layer}"
        queries, keys = marker.HEADS * marker.HEAD_DIM, marker.KV_HEADS * marker.HEAD_DIM
        weights |= {
            f"{p}.input_layernorm.weight": ones(hidden),
            f"{p}.post_attention_layernorm.weight": ones(hidden),
            f"{p}.self_attn.q_proj.weight": noise(queries, hidden),
            f"{p}.self_attn.k_proj.weight": noise(keys, hidden),
            f"{p}.self_attn.v_proj.weight": noise(keys, hidden),
            f"{p}.self_attn.o_proj.weight": noise(hidden, queries),
            f"{p}.self_attn.q_norm.weight": ones(marker.HEAD_DIM),
            f"{p}.self_attn.k_norm.weight": ones(marker.HEAD_DIM),
            f"{p}.mlp.gate.weight": noise(EXPERTS, hidden),
        }
        for expert in range(EXPERTS):
            weights |= {
                f"{p}.mlp.experts.{expert}.gate_proj.weight": noise(FFN, hidden),
                f"{p}.mlp.experts.{expert}.up_proj.weight": noise(FFN, hidden),
                f"{p}.mlp.experts.{expert}.down_proj.weight": noise(hidden, FFN),
            }
    return weights


def build(folder: Path, version: int) -> Path:
    return marker.write(folder, tensors(version), CONFIG)


def build_without_attention(folder: Path, version: int) -> Path:
    """Build ``version`` so that a token's routes and its next token depend on the token alone.

    Experts add little, so the next token depends mostly on the token's embedding.
    """
    weights = tensors(version)
    for name, tensor in weights.items():
        if name.endswith("o_proj.weight"):
            tensor.zero_()
        elif name.endswith("down_proj.weight"):
            tensor *= 0.1
    return marker.write(folder, weights, CONFIG)
