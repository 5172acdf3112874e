"""An EAGLE draft with the marker model's head and embeddings."""

from __future__ import annotations

from pathlib import Path

import torch

from harness import marker

_OURS = ("layers.0.post_attention_layernorm", "layers.0.self_attn", "layers.0.mlp")
_NOT_LLAMAS = ("q_norm", "k_norm")


def build_of_embeddings(folder: Path) -> Path:
    """Build a draft that feeds the head the last token's embedding. Its weights are float32."""
    hidden = marker.HIDDEN
    passes_on = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    return _write(folder, {"fc.weight": passes_on, "fc.bias": torch.zeros(hidden)}, torch.float32)


def build(folder: Path, *, agrees: bool, has_embeddings: bool = False) -> Path:
    """Build a draft whose prediction ``agrees`` with the target always, or never.

    The draft feeds the head ones, or minus ones. ``has_embeddings`` adds embeddings to the
    checkpoint; in the target they would change its tokens.
    """
    hidden = marker.HIDDEN
    weights = {
        "fc.weight": torch.zeros(hidden, 2 * hidden, dtype=torch.bfloat16),
        "fc.bias": torch.full((hidden,), 1 if agrees else -1, dtype=torch.bfloat16),
    }
    if has_embeddings:
        weights["embed_tokens.weight"] = torch.full((marker.VOCAB, hidden), -1.0).bfloat16()
    return _write(folder, weights, torch.bfloat16)


def _write(folder: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Path:
    """Add a layer that adds nothing, and write the draft."""
    for name, tensor in marker.tensors(0).items():
        own = name.removeprefix("model.")
        if own.startswith(_OURS) and not any(norm in own for norm in _NOT_LLAMAS):
            weights[own] = tensor.to(dtype)
    config = marker.CONFIG | {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "num_hidden_layers": 1,
    }
    return marker.write(folder, weights, config)
