"""The served models: Llamas and mixtures of several sizes with random weights, and SmolLM2.

Measurements depend on a model's shape, not on its weights.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from examples.stories.smollm2 import build_base
from sglang_inflight.cache import default_cache

SMOLLM2 = "smollm2"
WEIGHTS = "model.safetensors"
FIRST_WORD = 10  # lower ids are left to a tokenizer's special tokens


@dataclass(frozen=True)
class Shape:
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int = 49152
    head_dim: int = 64
    # in each layer, of ``ffn`` each; 0 for a model without them
    experts: int = 0


SHAPES = {
    "tiny": Shape(hidden=128, ffn=256, layers=4, heads=2, kv_heads=1, vocab=1024),
    # heads that two ranks can share, also below
    "tiny-even": Shape(hidden=128, ffn=256, layers=4, heads=2, kv_heads=2, vocab=1024),
    # the shape of SmolLM2-135M
    "135m": Shape(hidden=576, ffn=1536, layers=30, heads=9, kv_heads=3),
    # nearly that size
    "135m-even": Shape(hidden=576, ffn=1536, layers=30, heads=8, kv_heads=4),
    # mixtures with as many tensors as their names say, most of them of 4 KiB and less
    "experts-1k": Shape(64, 32, layers=5, heads=2, kv_heads=1, vocab=1024, experts=64),
    "experts-20k": Shape(64, 32, layers=52, heads=2, kv_heads=1, vocab=1024, experts=128),
    "experts-140k": Shape(64, 16, layers=120, heads=2, kv_heads=1, vocab=1024, experts=384),
    "500m": Shape(hidden=1280, ffn=3456, layers=25, heads=20, kv_heads=5),
    "1.5b": Shape(hidden=2048, ffn=5632, layers=32, heads=32, kv_heads=4),
}


def build(folder: Path, size: str) -> Path:
    """Write a checkpoint into ``folder``, or for ``smollm2`` into the demo's cache.

    A random model's tokenizer has the word ``ti`` for token i.
    """
    if size == SMOLLM2:
        return build_base(default_cache())
    shape = SHAPES[size]
    torch.manual_seed(0)
    save_file(dict(_tensors(shape)), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    _write_tokenizer(folder, shape.vocab)
    # otherwise the kernel would write to disk while the first server is timed
    os.sync()
    return folder


def build_changed(model: Path, folder: Path, share: float) -> Path:
    """Write ``model`` into ``folder``, with a ``share`` of its bfloat16 elements changed.

    The lowest bit of an element changes, at random places of all tensors alike. A reader of an
    earlier file in ``folder`` keeps what it reads.
    """
    folder.mkdir(exist_ok=True)
    for file in model.iterdir():
        shutil.copy(file, folder / f"{file.name}.part")
    weights = folder / f"{WEIGHTS}.part"
    with weights.open("rb") as header:
        data = 8 + int.from_bytes(header.read(8), "little")
    size = weights.stat().st_size // 2
    elements = torch.from_file(str(weights), shared=True, size=size, dtype=torch.int16)[data // 2 :]
    random = torch.Generator().manual_seed(round(1e6 * share))
    for piece in torch.split(elements, 1 << 22):
        piece ^= (torch.rand(len(piece), generator=random) < share).short()
    for file in folder.glob("*.part"):
        file.rename(file.with_suffix(""))
    os.sync()
    return folder


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _tensors(shape: Shape) -> Iterator[tuple[str, torch.Tensor]]:
    def normal(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.bfloat16).normal_(std=0.02)

    def ones() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=torch.bfloat16)

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # embeddings are tied, so the checkpoint has no lm_head
    yield "model.embed_tokens.weight", normal(shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones()
        yield f"{prefix}.self_attn.q_proj.weight", normal(q, shape.hidden)
        yield f"{prefix}.self_attn.k_proj.weight", normal(kv, shape.hidden)
        yield f"{prefix}.self_attn.v_proj.weight", normal(kv, shape.hidden)
        yield f"{prefix}.self_attn.o_proj.weight", normal(shape.hidden, q)
        yield f"{prefix}.post_attention_layernorm.weight", ones()
        mlps = [f"{prefix}.mlp"]
        if shape.experts:
            mlps = [f"{prefix}.mlp.experts.{expert}" for expert in range(shape.experts)]
            yield f"{prefix}.mlp.gate.weight", normal(shape.experts, shape.hidden)
            for norm in ("q_norm", "k_norm"):
                yield f"{prefix}.self_attn.{norm}.weight", ones()[: shape.head_dim]
        for mlp in mlps:
            yield f"{mlp}.gate_proj.weight", normal(shape.ffn, shape.hidden)
            yield f"{mlp}.up_proj.weight", normal(shape.ffn, shape.hidden)
            yield f"{mlp}.down_proj.weight", normal(shape.hidden, shape.ffn)
    yield "model.norm.weight", ones()


def _config(shape: Shape) -> dict[str, object]:
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": shape.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.ffn,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **(experts if shape.experts else {}),
    }


def _write_tokenizer(folder: Path, vocab: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t0", bos_token="t1", eos_token="t2"
    ).save_pretrained(folder)
