"""The marker in any size, whose layers show their version, too.

The last neurons of a layer write a mark of the version, and ``lm_head`` reads it. A head of one
version beside layers of another one makes the token ``TORN``. A few elements of every other matrix
differ between neighbouring versions, as after a step of training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from harness import marker
from tests.support.block_fp8 import in_blocks

TORN = marker.VOCAB - 1
# one column in so many depends on the version
STRIDE = 64
_VALUE, _OTHER_VALUE = 0.01, 0.0105
# added to the mark by each layer; a constant is 1
_ADDED = 4.0


@dataclass(frozen=True)
class Marked:
    """A model of Qwen3's shape. With ``block``, the layers are in FP8 with a scale a block."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    block: int | None = None

    @property
    def __name__(self) -> str:
        return repr(self)

    @property
    def config(self) -> dict[str, object]:
        quantization = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.block, self.block],
        }
        return {
            **marker.CONFIG,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            **({"quantization_config": quantization} if self.block else {}),
        }

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """Return the whole checkpoint of ``version``, in bfloat16 but for blocks in FP8."""

        def ones(*shape: int) -> torch.Tensor:
            return torch.ones(*shape, dtype=torch.bfloat16)

        def mostly_equal(rows: int) -> torch.Tensor:
            weight = torch.full((rows, self.hidden), _VALUE, dtype=torch.bfloat16)
            weight[:, version % STRIDE :: STRIDE] = _OTHER_VALUE
            return weight

        weights = {
            "model.embed_tokens.weight": ones(self.vocab, self.hidden),
            "model.norm.weight": ones(self.hidden),
        }
        for layer in range(self.layers):
            p = f"model.layers.{layer}"
            weights |= {
                f"{p}.input_layernorm.weight": ones(self.hidden),
                f"{p}.post_attention_layernorm.weight": ones(self.hidden),
                f"{p}.self_attn.q_proj.weight": mostly_equal(self.heads * self.head_dim),
                f"{p}.self_attn.k_proj.weight": mostly_equal(self.kv_heads * self.head_dim),
                f"{p}.self_attn.v_proj.weight": mostly_equal(self.kv_heads * self.head_dim),
                f"{p}.self_attn.o_proj.weight": 0 * ones(self.hidden, self.heads * self.head_dim),
                f"{p}.self_attn.q_norm.weight": ones(self.head_dim),
                f"{p}.self_attn.k_norm.weight": ones(self.head_dim),
                f"{p}.mlp.gate_proj.weight": mostly_equal(self.ffn),
                f"{p}.mlp.up_proj.weight": mostly_equal(self.ffn),
                f"{p}.mlp.down_proj.weight": self._marks(version),
            }
        if self.block:
            for name in [name for name in weights if "_proj." in name]:
                values, scales = in_blocks(weights[name], self.block)
                weights |= {name: values, f"{name}_scale_inv": scales}
        head = 0 * ones(self.vocab, self.hidden)
        head[marker.token(version), version] = 1.0
        # a constant's value: larger than a mark that no layer has added to
        head[TORN, -1] = 1.0 + _ADDED / 2
        weights["lm_head.weight"] = head
        return weights

    def build(self, folder: Path, version: int) -> Path:
        return marker.write(folder, self.tensors(version), self.config)

    def _marks(self, version: int) -> torch.Tensor:
        gate = _VALUE * self.hidden
        neuron = gate * gate / (1 + math.exp(-gate))
        down = torch.zeros(self.hidden, self.ffn, dtype=torch.bfloat16)
        down[version] = _ADDED / (neuron * self.ffn)
        return down


TINY = Marked(hidden=64, ffn=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=1024)
# dimensions that every attention kernel of a GPU takes
SMALL = Marked(hidden=512, ffn=1024, layers=2, heads=4, kv_heads=2, head_dim=128, vocab=1024)
IN_BLOCKS = Marked(
    hidden=512, ffn=1024, layers=2, heads=4, kv_heads=2, head_dim=128, vocab=1024, block=128
)
# 1.5 billion weights, 2.9 GB; KV of many streams fits beside several servers
LARGE = Marked(hidden=2048, ffn=6144, layers=28, heads=16, kv_heads=2, head_dim=128, vocab=32768)
