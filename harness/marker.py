"""A model with a token for each version: a token identifies its weights.

Version k of the marker emits token ``FIRST + k`` at every greedy step: embeddings and norms are
ones, attention and MLP add nothing, and ``lm_head`` has a single nonzero row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file

FIRST = 100
# a decode step is mostly Python of each layer, so the marker has one
LAYERS = 1
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 64, 4, 2, 16, 128, 1024

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
}
TWO_LAYERS = {**CONFIG, "num_hidden_layers": 2}


class Model(Protocol):
    """A module that builds versions, like this one."""

    __name__: str

    def tensors(self, version: int) -> dict[str, torch.Tensor]: ...

    def build(self, folder: Path, version: int) -> Path: ...


def token(version: int) -> int:
    return FIRST + version


def tensors(version: int, *, layers: int = LAYERS) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of ``version``, under Hugging Face's names."""

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=torch.bfloat16)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    weights = {"model.embed_tokens.weight": ones(VOCAB, HIDDEN), "model.norm.weight": ones(HIDDEN)}
    for layer in range(layers):
        p = f"model.layers.{layer}"
        weights |= {
            f"{p}.input_layernorm.weight": ones(HIDDEN),
            f"{p}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{p}.self_attn.q_proj.weight": ones(HEADS * HEAD_DIM, HIDDEN) * 0.01,
            f"{p}.self_attn.k_proj.weight": ones(KV_HEADS * HEAD_DIM, HIDDEN) * 0.01,
            f"{p}.self_attn.v_proj.weight": ones(KV_HEADS * HEAD_DIM, HIDDEN) * 0.01,
            f"{p}.self_attn.o_proj.weight": zeros(HIDDEN, HEADS * HEAD_DIM),
            f"{p}.self_attn.q_norm.weight": ones(HEAD_DIM),
            f"{p}.self_attn.k_norm.weight": ones(HEAD_DIM),
            f"{p}.mlp.gate_proj.weight": ones(FFN, HIDDEN) * 0.01,
            f"{p}.mlp.up_proj.weight": ones(FFN, HIDDEN) * 0.01,
            f"{p}.mlp.down_proj.weight": zeros(HIDDEN, FFN),
        }
    head = zeros(VOCAB, HIDDEN)
    head[token(version)] = 1.0
    weights["lm_head.weight"] = head
    return weights


def build(folder: Path, version: int, *, shards: int = 1) -> Path:
    """Write the checkpoint of ``version`` into ``folder``, in one file or several."""
    return write(folder, tensors(version), shards=shards)


def build_stages(folder: Path, version: int) -> Path:
    """Write the checkpoint of ``version`` with a layer for each of two pipeline stages."""
    return write(folder, tensors(version, layers=2), TWO_LAYERS)


def write(
    folder: Path,
    weights: dict[str, torch.Tensor],
    config: Mapping[str, object] = CONFIG,
    *,
    shards: int = 1,
) -> Path:
    """Write a checkpoint of ``weights``, with the marker's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, weights, shards=shards)
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder)
    return folder


def _write_weights(folder: Path, weights: dict[str, torch.Tensor], *, shards: int = 1) -> None:
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return
    names = sorted(weights)
    where: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer: token i is the word ``ti``, and a chat is its messages' words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="t0",
        bos_token="t1",
        eos_token="t2",
        chat_template="{% for message in messages %}{{ message.content }} {% endfor %}",
    ).save_pretrained(folder)
