"""Say which parts of a checkpoint's tensors one rank of Megatron has, for ``ShardSender``.

    shards = shards_of(named_parameters, model, tp=Place(tp_rank, tp_size))
    sender.send(shards, weight_version="43")

Megatron's parameters are other tensors than the checkpoint's. Queries, keys and values are one, so
are the gate and the projection up, and the vocabulary is padded. Names are Megatron's, in which
layers and experts are counted over all ranks, as slime's ``named_params_and_buffers`` does.

Llama, Qwen2 and Qwen3 are known, with experts and without. Its test cuts tensors as Megatron does.
It has not run with Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from sglang_inflight.client import Shard


class Place(NamedTuple):
    """This rank's place among the ``size`` ranks that share a parameter."""

    rank: int = 0
    size: int = 1


class Model(NamedTuple):
    """``queries``: heads of queries for each head of keys. ``vocabulary``: without padding."""

    head_size: int
    queries: int
    vocabulary: int


Part = tuple[str, torch.Tensor | Shard]
ALONE = Place()
VOCABULARY = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}
# every rank of a group has these whole
WHOLE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
QKV = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
EXPERT = re.compile(r"mlp\.experts\.linear_fc([12])\.weight(\d+)")


def shards_of(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    model: Model,
    *,
    tp: Place = ALONE,
    expert_tp: Place = ALONE,
) -> Iterator[Part]:
    """Yield the checkpoint's name of each part that this rank has, and the part.

    ``tp``: this rank's place in its tensor parallel group. ``expert_tp``: in that of experts.
    Raises ``ValueError`` for a name that is not known, and for half a head of keys.
    """
    for name, parameter in named_parameters:
        inner, tensor = name.removeprefix("module.module."), parameter.detach()
        if inner in VOCABULARY:
            yield VOCABULARY[inner], _without_padding(tensor, tp, model.vocabulary)
        elif inner == "decoder.final_layernorm.weight":
            yield "model.norm.weight", tensor
        elif (layer := LAYER.fullmatch(inner)) is not None:
            for of, part in _of_layer(layer[2], tensor, model, tp, expert_tp):
                yield f"model.layers.{layer[1]}.{of}", part
        else:
            raise ValueError(f"nothing is known of Megatron's {name!r}")


def _of_layer(
    name: str, tensor: torch.Tensor, model: Model, tp: Place, expert_tp: Place
) -> Iterator[Part]:
    if name in WHOLE:
        yield WHOLE[name], tensor
    elif (qkv := QKV.fullmatch(name)) is not None:
        for of, heads in zip("qkv", _heads(tensor, model), strict=True):
            yield f"self_attn.{of}_proj.{qkv[1]}", _rows(heads, tp)
    elif (expert := EXPERT.fullmatch(name)) is not None:
        of_mlp = _up if expert[1] == "1" else _down
        yield from of_mlp(f"mlp.experts.{expert[2]}", tensor, expert_tp)
    elif name == "self_attention.linear_proj.weight":
        yield "self_attn.o_proj.weight", _columns(tensor, tp)
    elif name == "mlp.linear_fc1.weight":
        yield from _up("mlp", tensor, tp)
    elif name == "mlp.linear_fc2.weight":
        yield from _down("mlp", tensor, tp)
    else:
        raise ValueError(f"nothing is known of Megatron's {name!r} in a layer")


def _heads(tensor: torch.Tensor, model: Model) -> Iterator[torch.Tensor]:
    """Yield the queries, the keys and the values. A group has its queries first, then one of each.

    A rank has whole groups. With fewer heads of keys than ranks Megatron cuts a group.
    """
    of_group = model.queries + 2
    if len(tensor) % (of_group * model.head_size):
        raise ValueError("this rank has a part of a group of heads: use a smaller tensor parallel")
    groups = tensor.view(-1, of_group, model.head_size, *tensor.shape[1:])
    for first, end in ((0, -2), (-2, -1), (-1, of_group)):
        yield groups[:, first:end].flatten(0, 2)


def _up(mlp: str, tensor: torch.Tensor, place: Place) -> Iterator[Part]:
    # each rank has its rows of both, and not those of one
    gate, up = tensor.chunk(2)
    yield f"{mlp}.gate_proj.weight", _rows(gate, place)
    yield f"{mlp}.up_proj.weight", _rows(up, place)


def _down(mlp: str, tensor: torch.Tensor, place: Place) -> Iterator[Part]:
    yield f"{mlp}.down_proj.weight", _columns(tensor, place)


def _rows(tensor: torch.Tensor, place: Place) -> Shard:
    """Return a part of a column parallel layer."""
    rows, *rest = tensor.shape
    starts = (place.rank * rows, *(0 for _ in rest))
    return Shard(tensor, starts, (place.size * rows, *rest))


def _columns(tensor: torch.Tensor, place: Place) -> Shard:
    """Return a part of a row parallel layer."""
    rows, columns = tensor.shape
    return Shard(tensor, (0, place.rank * columns), (rows, place.size * columns))


def _without_padding(tensor: torch.Tensor, place: Place, vocabulary: int) -> Shard:
    # the last ranks may have nothing but padding
    start = min(place.rank * len(tensor), vocabulary)
    kept = tensor[: vocabulary - start]
    return Shard(kept, (start, 0), (vocabulary, tensor.shape[1]))
