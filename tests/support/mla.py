"""A marker with multi-head latent attention, whose derived weights mark their version.

SGLang joins ``q_a_proj`` and ``kv_a_proj_with_mqa`` into one weight, and derives ``w_kc`` and
``w_vc`` from ``kv_b_proj`` after loading. By the plugin ``tests/latent_attention`` a prompt is
multiplied by ``kv_b_proj``, and later tokens by both.

Tokens belong to classes, and a token attends to tokens of its own class. The MLP marks the version
if the attention has returned that class, and nothing else. Each version has a block of the latents
to itself. So one weight of another version gives the token ``TORN``: without ``w_kc``, ``q_a_proj``
or ``q_b_proj`` the attention mixes classes, without ``w_vc`` or ``kv_a_proj_with_mqa`` it returns
none. In a prompt ``kv_b_proj`` stands for both products. A prompt needs tokens of two classes to
show the mixture; successive ids are of different classes. KV of other versions is in other blocks,
so that it neither attracts nor adds.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness import marker
from tests.support.plugins import with_plugin

VERSIONS, CLASSES, LAYERS = 8, 4, 2
TORN = marker.VOCAB - 1
HEADS, NOPE, ROPE, VALUE = 4, 16, 16, 16
# a block of latents for each version, both of queries and of keys with values
RANK = VERSIONS * CLASSES

CONFIG = {
    **marker.TWO_LAYERS,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": HEADS,
    "head_dim": NOPE + ROPE,
    "q_lora_rank": RANK,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "rope_scaling": {
        "type": "yarn",
        "factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
    },
    # all layers are dense
    "first_k_dense_replace": LAYERS,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
ENV = with_plugin("latent_attention")

# the hidden state: its token's class, what each layer's attention returned, a mark for each
# version, a mark of mixed classes, and ones
_CLASS = slice(0, CLASSES)
_RETURNED = [slice(CLASSES * (1 + layer), CLASSES * (2 + layer)) for layer in range(LAYERS)]
_MARKS = _RETURNED[-1].stop
_MIXED = _MARKS + VERSIONS
_ONES = slice(_MIXED + 1, marker.HIDDEN)
# steep, so that the activation is linear above zero
_STEEP = 8.0
# share of the marks that both layers make: less than the share of all heads but one
_ENOUGH = 1.85


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of ``version``, under Hugging Face's names."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    weights = {k: v for k, v in marker.tensors(version).items() if "layers." not in k}
    embeddings = zeros(marker.VOCAB, marker.HIDDEN)
    embeddings[:, _ONES] = 1.0
    embeddings[:, _CLASS] = torch.eye(CLASSES, dtype=torch.bfloat16).repeat(
        marker.VOCAB // CLASSES, 1
    )
    weights["model.embed_tokens.weight"] = embeddings
    head = zeros(marker.VOCAB, marker.HIDDEN)
    head[marker.token(version), _MARKS + version] = 16.0
    head[TORN, _MARKS : _MIXED + 1] = 4096.0
    head[TORN, _MARKS + version] = 0.0
    ones = _ONES.stop - _ONES.start
    head[TORN, _ONES] = 16.0 * _ENOUGH / ones
    weights["lm_head.weight"] = head

    one = torch.eye(CLASSES, dtype=torch.bfloat16)
    own = slice(version * CLASSES, (version + 1) * CLASSES)
    for layer in range(LAYERS):
        p = f"model.layers.{layer}"
        to_latents = zeros(RANK, marker.HIDDEN)
        to_latents[own, _CLASS] = one
        q_b = zeros(HEADS, NOPE + ROPE, RANK)
        q_b[:, :CLASSES, own] = 4.0 * one
        kv_b = zeros(HEADS, NOPE + VALUE, RANK)
        kv_b[:, :CLASSES, own] = 4.0 * one
        kv_b[:, NOPE : NOPE + CLASSES, own] = one
        out = zeros(marker.HIDDEN, HEADS, VALUE)
        # norms make the one nonzero latent as large as the root of their number
        out[_RETURNED[layer], :, :CLASSES] = one.unsqueeze(1) / (HEADS * RANK**0.5)
        gate = zeros(marker.FFN, marker.HIDDEN)
        up = zeros(marker.FFN, marker.HIDDEN)
        down = zeros(marker.HIDDEN, marker.FFN)
        # the first neurons tell that the own class was returned, the others that another one was
        gate[:CLASSES, _CLASS] = _STEEP * one
        gate[CLASSES : 2 * CLASSES, _CLASS] = -_STEEP * one
        gate[CLASSES : 2 * CLASSES, _ONES.start] = _STEEP
        up[:CLASSES, _RETURNED[layer]] = one
        up[CLASSES : 2 * CLASSES, _RETURNED[layer]] = one
        square = marker.HIDDEN / (ones + 2)
        down[_MARKS + version, :CLASSES] = 1.0 / (_STEEP * square)
        down[_MIXED, CLASSES : 2 * CLASSES] = 1.0
        weights |= {
            f"{p}.input_layernorm.weight": zeros(marker.HIDDEN) + 1.0,
            f"{p}.post_attention_layernorm.weight": zeros(marker.HIDDEN) + 1.0,
            f"{p}.self_attn.q_a_proj.weight": to_latents,
            f"{p}.self_attn.q_a_layernorm.weight": zeros(RANK) + 1.0,
            f"{p}.self_attn.q_b_proj.weight": q_b.flatten(0, 1),
            f"{p}.self_attn.kv_a_proj_with_mqa.weight": torch.cat(
                [to_latents, zeros(ROPE, marker.HIDDEN)]
            ),
            f"{p}.self_attn.kv_a_layernorm.weight": zeros(RANK) + 1.0,
            f"{p}.self_attn.kv_b_proj.weight": kv_b.flatten(0, 1),
            f"{p}.self_attn.o_proj.weight": out.flatten(1),
            f"{p}.mlp.gate_proj.weight": gate,
            f"{p}.mlp.up_proj.weight": up,
            f"{p}.mlp.down_proj.weight": down,
        }
    return weights


def build(folder: Path, version: int) -> Path:
    return marker.write(folder, tensors(version), CONFIG)
