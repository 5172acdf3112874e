"""A tiny model with as many tensors as the largest: DeepSeek-V3's class, and Kimi K2's experts.

``FP8`` has Kimi K2's 61 layers of 384 experts, each in FP8 with a scale for each block of 16 by 16.
``BF16`` has twice as many layers, and no scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from harness import marker

# a server on a CPU pads a smaller FFN
HIDDEN, FFN, HEADS, RANK, HEAD, BLOCK = 32, 32, 2, 32, 16, 16
_SCALE = "_scale_inv"


@dataclass(frozen=True)
class Many:
    """``layers``, of which all but the first have ``experts``."""

    layers: int
    experts: int
    is_fp8: bool


FP8, BF16 = Many(61, 384, is_fp8=True), Many(121, 384, is_fp8=False)


def tensors(many: Many, version: int) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of ``version``, under Hugging Face's names."""
    random = torch.Generator().manual_seed(version)
    return {
        name: stored
        for name, shape in _shapes(many)
        for name, stored in _stored(name, shape, random, is_fp8=many.is_fp8)
    }


def changed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``weights`` with another last element in each that is bfloat16."""
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in changed.values():
        if tensor.dtype == torch.bfloat16:
            tensor.view(-1)[-1] += 1.0
    return changed


def write(folder: Path, many: Many, weights: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint with ``weights`` into ``folder``."""
    # a header of all names would be larger than servers read
    return marker.write(folder, weights, _config(many), shards=8)


def _shapes(many: Many) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (marker.VOCAB, HIDDEN)
    for layer in range(many.layers):
        path = f"model.layers.{layer}"
        yield f"{path}.input_layernorm.weight", (HIDDEN,)
        yield f"{path}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{path}.self_attn.q_a_proj.weight", (RANK, HIDDEN)
        yield f"{path}.self_attn.q_a_layernorm.weight", (RANK,)
        yield f"{path}.self_attn.q_b_proj.weight", (HEADS * 2 * HEAD, RANK)
        yield f"{path}.self_attn.kv_a_proj_with_mqa.weight", (RANK + HEAD, HIDDEN)
        yield f"{path}.self_attn.kv_a_layernorm.weight", (RANK,)
        yield f"{path}.self_attn.kv_b_proj.weight", (HEADS * 2 * HEAD, RANK)
        yield f"{path}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD)
        mlps = [f"{path}.mlp"]
        if layer:
            yield f"{path}.mlp.gate.weight", (many.experts, HIDDEN)
            yield f"{path}.mlp.gate.e_score_correction_bias", (many.experts,)
            experts = (f"{path}.mlp.experts.{expert}" for expert in range(many.experts))
            mlps = [f"{path}.mlp.shared_experts", *experts]
        for mlp in mlps:
            yield f"{mlp}.gate_proj.weight", (FFN, HIDDEN)
            yield f"{mlp}.up_proj.weight", (FFN, HIDDEN)
            yield f"{mlp}.down_proj.weight", (HIDDEN, FFN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (marker.VOCAB, HIDDEN)


def _stored(
    name: str, shape: tuple[int, ...], random: torch.Generator, *, is_fp8: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    if is_fp8 and "_proj" in name:
        # finite ones
        bits = torch.randint(0x78, shape, generator=random, dtype=torch.uint8)
        yield name, bits.view(torch.float8_e4m3fn)
        blocks = [-(-size // BLOCK) for size in shape]
        yield name + _SCALE, torch.rand(blocks, generator=random) * 0.01
    elif name.endswith("_bias"):
        yield name, torch.rand(shape, generator=random)
    else:
        noise = torch.randn(shape, generator=random) * 0.05
        yield name, (noise + (1.0 if len(shape) == 1 else 0.0)).bfloat16()


def _config(many: Many) -> dict[str, object]:
    fp8 = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    return {
        **marker.CONFIG,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "moe_intermediate_size": FFN,
        "num_hidden_layers": many.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": 2 * HEAD,
        "q_lora_rank": RANK,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": HEAD,
        "qk_rope_head_dim": HEAD,
        "v_head_dim": HEAD,
        "n_routed_experts": many.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        **({"quantization_config": fp8} if many.is_fp8 else {}),
    }
