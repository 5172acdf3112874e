"""A marker in which each linear layer is a link to its version's token, by value and by scale.

Each version has an output of its own in every layer, so a weight of another version breaks the
chain. And each version has a size of its own: a layer divides by what the layer before has
multiplied by. So a scale of another version makes the version's mark too small or too large. The
tokens are then ``TORN`` and ``TOO_LARGE``.

Queries and keys of a version are in dimensions of their own, so a token attends to KV of its
version alone. A quantized layer's numbers are powers of two, or zero.
"""

from __future__ import annotations

import torch

from harness import marker

VERSIONS = 6
LAYERS = 2
TORN, TOO_LARGE = marker.VOCAB - 1, marker.VOCAB - 2

# the hidden state: what each layer's attention returned, a mark for each version, and constants
# large enough that norms depend on nothing else
_RETURNED = [VERSIONS * layer for layer in range(LAYERS)]
_MARKS = VERSIONS * LAYERS
_CONSTANTS = _MARKS + VERSIONS
_CONSTANT = 16.0
# what a norm makes of a constant
_UNIT = (marker.HIDDEN / (marker.HIDDEN - _CONSTANTS)) ** 0.5
# steep enough that the activation is linear
_STEEP = 8.0
_TOLERANCE = 0.08


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of ``version`` in bfloat16, under Hugging Face's names."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    weights = marker.tensors(version, layers=LAYERS)
    weights["model.embed_tokens.weight"][:, :_CONSTANTS] = 0.0
    weights["model.embed_tokens.weight"][:, _CONSTANTS:] = _CONSTANT
    # larger than every other number of its layer
    size = 16.0 * 2.0**version
    for layer, returned in enumerate(_RETURNED):
        p = f"model.layers.{layer}"
        heads = {"q": marker.HEADS, "k": marker.KV_HEADS, "v": marker.KV_HEADS}
        for name, count in heads.items():
            rows = zeros(count, marker.HEAD_DIM, marker.HIDDEN)
            rows[:, version, _CONSTANTS] = size if name == "v" else 1.0
            weights[f"{p}.self_attn.{name}_proj.weight"] = rows.flatten(0, 1)
        # attention is certain
        weights[f"{p}.self_attn.q_norm.weight"] *= 4.0
        weights[f"{p}.self_attn.k_norm.weight"] *= 4.0
        out = zeros(marker.HIDDEN, marker.HEADS, marker.HEAD_DIM)
        out[returned + version, :, version] = 1.0 / size
        weights[f"{p}.self_attn.o_proj.weight"] = out.flatten(1)
        gate, up = zeros(marker.FFN, marker.HIDDEN), zeros(marker.FFN, marker.HIDDEN)
        gate[version, _CONSTANTS] = _STEEP
        up[version, returned + version] = size
        weights[f"{p}.mlp.gate_proj.weight"] = gate
        weights[f"{p}.mlp.up_proj.weight"] = up
        down = zeros(marker.HIDDEN, marker.FFN)
        down[_MARKS + version, version] = 1.0 / size
        weights[f"{p}.mlp.down_proj.weight"] = down

    returned_size = marker.HEADS * _UNIT
    mark = _STEEP * _UNIT * returned_size * _UNIT / _CONSTANT * LAYERS
    head = zeros(marker.VOCAB, marker.HIDDEN)
    own = _MARKS + version
    head[marker.token(version), own] = 1.0
    head[TORN, _MARKS:_CONSTANTS] = 16.0
    head[TORN, own] = 0.0
    head[TORN, _CONSTANTS] = (1.0 - _TOLERANCE) * mark / _CONSTANT
    # equally likely as the version's token if the mark is too large by the tolerance
    head[TOO_LARGE, own] = 4.0
    head[TOO_LARGE, _CONSTANTS] = -3.0 * (1.0 + _TOLERANCE) * mark / _CONSTANT
    weights["lm_head.weight"] = head
    return weights
