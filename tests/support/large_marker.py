"""A marker model of any size, for measuring the release of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from harness import marker


@dataclass(frozen=True)
class LargeMarker:
    """The marker with a larger vocabulary, and wider or more attention heads."""

    vocab: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token."""
        return 2 * marker.LAYERS * self.kv_heads * self.head_dim * 2

    @property
    def weights_bytes(self) -> int:
        """Bytes of embeddings and head; other weights are small."""
        return 2 * self.vocab * marker.HIDDEN * 2

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        def ones(*shape: int) -> torch.Tensor:
            return torch.ones(*shape, dtype=torch.bfloat16)

        weights = marker.tensors(version)
        weights["model.embed_tokens.weight"] = ones(self.vocab, marker.HIDDEN)
        head = torch.zeros(self.vocab, marker.HIDDEN, dtype=torch.bfloat16)
        head[marker.token(version)] = 1.0
        weights["lm_head.weight"] = head
        width = self.heads * self.head_dim
        for layer in range(marker.LAYERS):
            p = f"model.layers.{layer}.self_attn"
            weights[f"{p}.q_proj.weight"] = ones(width, marker.HIDDEN) * 0.01
            for name in ("k_proj", "v_proj"):
                kv_width = self.kv_heads * self.head_dim
                weights[f"{p}.{name}.weight"] = ones(kv_width, marker.HIDDEN) * 0.01
            weights[f"{p}.o_proj.weight"] = ones(marker.HIDDEN, width) * 0
            for name in ("q_norm", "k_norm"):
                weights[f"{p}.{name}.weight"] = ones(self.head_dim)
        return weights

    def build(self, folder: Path, version: int) -> Path:
        return self.write(folder, self.tensors(version))

    def write(self, folder: Path, weights: dict[str, torch.Tensor]) -> Path:
        config = {
            **marker.CONFIG,
            "vocab_size": self.vocab,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }
        return marker.write(folder, weights, config)
