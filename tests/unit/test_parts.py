"""A plan of parts moves from the part of a tensor what the plan moves from all of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_inflight.scheduler.plans.moves import Box, move
from sglang_inflight.scheduler.plans.parts import Parts, parts_of
from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.plans.record import Kind
from sglang_inflight.scheduler.plans.recorder import Planned
from sglang_inflight.vocabulary.regions import Region

SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


def planned(views: list[torch.Tensor], full: torch.Tensor) -> tuple[Plan, list[torch.Tensor]]:
    """Return a plan by which each of ``views`` of ``full`` goes to a weight, and the weights."""
    weights, moves = [], []
    for n, view in enumerate(views):
        weights.append(torch.zeros(view.shape, dtype=full.dtype))
        moves.append(Planned(f"w{n}", move(Box.of(view), Box.of(weights[-1]))))
    kinds = {"t": Kind(tuple(full.shape), full.dtype)}
    return Plan(kinds, {"t": tuple(moves)}, {}, {}), weights


def assert_moves_the_same(
    parts: Parts, views: list[torch.Tensor], full: torch.Tensor, weights: list[torch.Tensor]
) -> None:
    region = parts.wanted["t"]
    part = full[region.slices()].contiguous().view(-1)
    assert parts.plan.kinds["t"].shape == region.sizes
    for each, view, weight in zip(parts.plan.moves["t"], views, weights, strict=True):
        each.move.target.view(weight.view(-1)).copy_(each.move.source.view(part))
        assert torch.equal(weight, view)


@st.composite
def views_of(draw: st.DrawFn, full: torch.Tensor) -> torch.Tensor:
    """A view as loaders make them: narrowed, stepped, transposed, and reshaped."""
    view = full
    for _ in range(draw(st.integers(0, 3))):
        dim = draw(st.integers(0, view.dim() - 1))
        kind = draw(st.sampled_from(["narrow", "step", "swap", "split", "join"]))
        if kind == "narrow":
            start = draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, start, draw(st.integers(1, view.shape[dim] - start)))
        elif kind == "step":
            at = [slice(None)] * view.dim()
            at[dim] = slice(draw(st.integers(0, min(1, view.shape[dim] - 1))), None, 2)
            view = view[tuple(at)]
        elif kind == "swap":
            view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
        elif kind == "split" and view.shape[dim] % 2 == 0:
            view = view.unflatten(dim, (2, view.shape[dim] // 2))
        elif kind == "join" and view.is_contiguous():
            view = view.view(-1)
    return view


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_parts_of_a_tensor_give_what_the_tensor_gives(data: st.DataObject) -> None:
    shape = data.draw(SIZES)
    full = torch.arange(math.prod(shape), dtype=torch.int64).view(shape)
    views = data.draw(st.lists(views_of(full), min_size=1, max_size=3))
    plan, weights = planned(views, full)
    parts = parts_of(plan, ())
    assert_moves_the_same(parts, views, full, weights)


SHARDS = {
    "rows": (lambda t: t[4:8], Region((4, 0), (4, 6))),
    "columns": (lambda t: t[:, 2:4], Region((0, 2), (12, 2))),
    "columns, transposed": (lambda t: t[:, 2:4].t(), Region((0, 2), (12, 2))),
    "heads": (lambda t: t.view(3, 4, 6)[1], Region((4, 0), (4, 6))),
    "rows and columns": (lambda t: t[3:6, 1:5], Region((3, 1), (3, 4))),
    "every second row": (lambda t: t[1::2], Region((1, 0), (11, 6))),
    "all": (lambda t: t, Region((0, 0), (12, 6))),
    "one element": (lambda t: t[5, 3], Region((5, 3), (1, 1))),
}


@pytest.mark.parametrize("name", SHARDS)
def test_part_is_no_larger_than_a_rank_keeps(name: str) -> None:
    shard, region = SHARDS[name]
    full = torch.arange(72).view(12, 6)
    views = [shard(full)]
    plan, weights = planned(views, full)
    parts = parts_of(plan, ())
    assert parts.wanted == {"t": region}
    assert_moves_the_same(parts, views, full, weights)


def test_two_weights_of_one_tensor_want_what_is_around_both() -> None:
    full = torch.arange(72).view(12, 6)
    views = [full[2:4], full[6:8, 1:3]]
    plan, weights = planned(views, full)
    parts = parts_of(plan, ())
    assert parts.wanted == {"t": Region((2, 0), (6, 6))}
    assert_moves_the_same(parts, views, full, weights)


def test_tensor_for_the_loader_is_wanted_whole_and_an_unused_one_not_at_all() -> None:
    kinds = {name: Kind((4, 4), torch.float32) for name in ("loader", "both", "unused", "other")}
    rows = Planned("w", move(Box(0, (4,), (1,)), Box(0, (4,), (1,))))
    plan = Plan(kinds, {"both": (rows,), "unused": ()}, {"loader": "why", "other": "why"}, {})
    parts = parts_of(plan, ["loader", "both"])
    assert parts.wanted == dict.fromkeys(("loader", "both"), Region((0, 0), (4, 4)))
    assert parts.plan.moves == plan.moves
    assert parts.plan.kinds == plan.kinds
