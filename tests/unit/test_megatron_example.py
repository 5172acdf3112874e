"""The example for Megatron finds each element of a checkpoint on the ranks that have it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from examples.megatron import ALONE, Model, Place, shards_of
from sglang_inflight.client import Shard

LAYERS, HIDDEN, HEAD, GROUPS, QUERIES = 2, 12, 2, 4, 3
WIDTH, EXPERTS, EXPERT_WIDTH, VOCABULARY = 8, 4, 6, 21
MODEL = Model(head_size=HEAD, queries=QUERIES, vocabulary=VOCABULARY)
Tensors = dict[str, torch.Tensor]


def checkpoint() -> Tensors:
    """Return a checkpoint whose first layer is dense, and whose second one has experts."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "lm_head": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm": (HIDDEN,),
            f"{at}.post_attention_layernorm": (HIDDEN,),
            f"{at}.self_attn.q_norm": (HEAD,),
            f"{at}.self_attn.k_norm": (HEAD,),
            f"{at}.self_attn.q_proj": (GROUPS * QUERIES * HEAD, HIDDEN),
            f"{at}.self_attn.k_proj": (GROUPS * HEAD, HIDDEN),
            f"{at}.self_attn.v_proj": (GROUPS * HEAD, HIDDEN),
            f"{at}.self_attn.o_proj": (HIDDEN, GROUPS * QUERIES * HEAD),
        }
    mlps = {"model.layers.0.mlp": WIDTH}
    mlps |= {f"model.layers.1.mlp.experts.{n}": EXPERT_WIDTH for n in range(EXPERTS)}
    for mlp, width in mlps.items():
        shapes |= {
            f"{mlp}.gate_proj": (width, HIDDEN),
            f"{mlp}.up_proj": (width, HIDDEN),
            f"{mlp}.down_proj": (HIDDEN, width),
        }
    shapes["model.layers.1.mlp.gate"] = (EXPERTS, HIDDEN)
    found = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    for of, heads in (("q", GROUPS * QUERIES), ("k", GROUPS), ("v", GROUPS)):
        found[f"model.layers.0.self_attn.{of}_proj.bias"] = torch.randn(heads * HEAD)
    return found


def megatron(full: Tensors, tp: Place, ep: Place, etp: Place) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a rank of Megatron has of ``full``."""
    padded = 24
    for name, of in (
        ("embedding.word_embeddings", "model.embed_tokens"),
        ("output_layer", "lm_head"),
    ):
        rows = torch.cat([full[f"{of}.weight"], torch.full((padded - VOCABULARY, HIDDEN), 9.0)])
        yield f"module.module.{name}.weight", rows.chunk(tp.size)[tp.rank]
    yield "module.module.decoder.final_layernorm.weight", full["model.norm.weight"]
    for layer in range(LAYERS):
        of, at = f"model.layers.{layer}", f"module.module.decoder.layers.{layer}"
        attention = f"{at}.self_attention"
        for kind in ("weight", "bias"):
            if f"{of}.self_attn.q_proj.{kind}" not in full:
                continue
            parts = [full[f"{of}.self_attn.{each}_proj.{kind}"].chunk(GROUPS) for each in "qkv"]
            groups = [part for group in zip(*parts, strict=True) for part in group]
            yield f"{attention}.linear_qkv.{kind}", torch.cat(groups).chunk(tp.size)[tp.rank]
        proj = full[f"{of}.self_attn.o_proj.weight"].chunk(tp.size, 1)[tp.rank]
        yield f"{attention}.linear_proj.weight", proj
        yield f"{attention}.linear_qkv.layer_norm_weight", full[f"{of}.input_layernorm.weight"]
        for each in "qk":
            norm = full[f"{of}.self_attn.{each}_norm.weight"]
            yield f"{attention}.{each}_layernorm.weight", norm
        norm = full[f"{of}.post_attention_layernorm.weight"]
        if layer == 0:
            yield f"{at}.mlp.linear_fc1.layer_norm_weight", norm
            up, down = mlp(full, f"{of}.mlp", tp)
            yield f"{at}.mlp.linear_fc1.weight", up
            yield f"{at}.mlp.linear_fc2.weight", down
            continue
        yield f"{at}.pre_mlp_layernorm.weight", norm
        yield f"{at}.mlp.router.weight", full[f"{of}.mlp.gate.weight"]
        own = EXPERTS // ep.size
        for expert in range(ep.rank * own, (ep.rank + 1) * own):
            up, down = mlp(full, f"{of}.mlp.experts.{expert}", etp)
            yield f"{at}.mlp.experts.linear_fc1.weight{expert}", up
            yield f"{at}.mlp.experts.linear_fc2.weight{expert}", down


def mlp(full: Tensors, name: str, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = (full[f"{name}.{each}_proj.weight"] for each in ("gate", "up"))
    both = [each.chunk(place.size)[place.rank] for each in (gate, up)]
    return torch.cat(both), full[f"{name}.down_proj.weight"].chunk(place.size, 1)[place.rank]


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_rank_has_another_part_or_an_element_is_nowhere(tp: int, ep: int, etp: int) -> None:
    full = checkpoint()
    counts = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in full.items()}
    places = [
        (Place(a, tp), Place(b, ep), Place(c, etp))
        for a in range(tp)
        for b in range(ep)
        for c in range(etp)
    ]
    for place, of_experts, in_expert in places:
        held = megatron(full, place, of_experts, in_expert)
        for name, part in shards_of(held, MODEL, tp=place, expert_tp=in_expert):
            if not isinstance(part, Shard):
                part = Shard(part, (0,) * part.dim(), tuple(part.shape))
            assert part.shape == full[name].shape
            slices = part.region.slices()
            assert torch.equal(full[name][slices], part.tensor)
            counts[name][slices] += 1
    assert all(count.min() > 0 for count in counts.values())


def test_rank_with_padding_alone_has_rows() -> None:
    name = "module.module.output_layer.weight"
    ((found, part),) = shards_of([(name, torch.ones(6, 2))], MODEL, tp=Place(4, 5))
    assert found == "lm_head.weight"
    assert isinstance(part, Shard)
    assert part.tensor.numel() == 0
    assert part.region.is_within((VOCABULARY, 2))


@pytest.mark.parametrize(
    ("name", "rows", "why"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.weight", HEAD, "part of a group of heads"),
        ("decoder.layers.0.mlp.linear_fc3.weight", 4, "'mlp.linear_fc3.weight' in a layer"),
        ("vision.patches.weight", 4, "'module.module.vision.patches.weight'"),
    ],
)
def test_unknown_parameter_is_sent(name: str, rows: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        list(shards_of([(f"module.module.{name}", torch.ones(rows, 2))], MODEL, tp=ALONE))
