"""A marker with its version in a norm that SGLang holds twice: as stored, and plus one.

Gemma 2 has such norms, a tied head, and a buffer outside every checkpoint. Embeddings are alike in
all versions: each has a block of its own, over a constant. The last norm lets its version's block
through, so that version's token is the likeliest after any token.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness import marker

VERSIONS, LAYERS = 8, 2
_BLOCK = marker.HIDDEN // VERSIONS

CONFIG = {
    **marker.TWO_LAYERS,
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": marker.HEAD_DIM,
    "sliding_window": 4096,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
}


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of ``version``, under Hugging Face's names."""
    weights = marker.tensors(0, layers=LAYERS)
    del weights["lm_head.weight"]
    embeddings = weights["model.embed_tokens.weight"]
    for each in range(VERSIONS):
        embeddings[marker.token(each), _BLOCK * each : _BLOCK * (each + 1)] += 1.0
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            weights[f"{path}.{name}.weight"] = torch.zeros(marker.HIDDEN, dtype=torch.bfloat16)
        for name in ("q_norm", "k_norm"):
            del weights[f"{path}.self_attn.{name}.weight"]
    weights |= norm(version)
    return weights


def norm(version: int) -> dict[str, torch.Tensor]:
    """Return the only tensor to differ between versions."""
    weight = torch.full((marker.HIDDEN,), -1.0, dtype=torch.bfloat16)
    weight[_BLOCK * version : _BLOCK * (version + 1)] = 0.0
    return {"model.norm.weight": weight}


def build(folder: Path, version: int) -> Path:
    return marker.write(folder, tensors(version), CONFIG)
