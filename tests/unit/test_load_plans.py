"""A plan has a loader's moves of data, and nothing that the loader computes or decides by value."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from sglang_inflight.scheduler.plans.finding import find_plan
from sglang_inflight.scheduler.plans.moves import (
    CONSTANT,
    Box,
    addresses,
    move,
    moves_of,
    overlap,
)
from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.plans.record import Kind, record
from sglang_inflight.scheduler.plans.recorder import Recorded
from sglang_inflight.scheduler.update.rate import UNPACED

Tensors = dict[str, torch.Tensor]
Weights = Iterable[tuple[str, torch.Tensor]]
DTYPE = torch.bfloat16
NAMES = ("a", "b", "c")
SHAPE = 6, 4


def checkpoint(seed: int, dtype: torch.dtype = DTYPE) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SHAPE, generator=random).to(dtype) for name in NAMES}


class Model(nn.Module):
    """Three weights. ``load`` gets each tensor of the checkpoint, of the weights' shape."""

    a: nn.Parameter
    b: nn.Parameter
    c: nn.Parameter

    def __init__(self, dtype: torch.dtype = DTYPE) -> None:
        super().__init__()
        for name in NAMES:
            weight = nn.Parameter(torch.zeros(SHAPE, dtype=dtype), requires_grad=False)
            self.register_parameter(name, weight)
        self.gate = nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=False)

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.load(name, tensor)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        getattr(self, name).data.copy_(tensor)


def recorded(model: nn.Module, tensors: Tensors) -> Recorded:
    kinds = {name: Kind(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    return record(model, kinds)


def replay(found: Recorded, model: nn.Module, tensors: Tensors) -> None:
    weights = dict(model.named_parameters())
    for name, tensor in tensors.items():
        for each in found.moves.get(name, ()):
            source = tensor.view(-1)
            for dtype in each.through:
                source = source.to(dtype)
            to = each.move.target.view(weights[each.place].data)
            to.copy_(each.move.source.view(source))


@torch.no_grad()
def assert_planned_or_named(model: nn.Module, tensors: Tensors, others: Tensors) -> Recorded:
    """Assert that moves give a fresh load of ``others``, in all weights without another reason."""
    model.load_weights(tensors.items())  # type: ignore[operator]
    found = recorded(model, tensors)
    replay(found, model, others)
    updated = {name: weight.clone() for name, weight in model.named_parameters()}
    model.load_weights(others.items())  # type: ignore[operator]
    moved = {each.place for moves in found.moves.values() for each in moves}
    for name, weight in model.named_parameters():
        if found.unplanned and name not in moved:
            continue
        assert torch.equal(updated[name].view(torch.int16), weight.view(torch.int16)), name
    return found


# ---- loaders of one habit --------------------------------------------------------------


class Holds(Model):
    """Joins two tensors, and holds the first until the second has come."""

    held: torch.Tensor | None = None

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "a":
            self.held = tensor
        elif name == "b":
            assert self.held is not None
            both = torch.cat([self.held[:3], tensor[3:]], dim=0)
            self.a.data.copy_(both)
            self.b.data.copy_(torch.stack([tensor.t()[0], self.held.t()[1]]).repeat(2, 1).t())
            self.held = None
        else:
            super().load(name, tensor.flip(1).clone())


class Casts(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor.to(torch.float16).float())


class Pads(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        padded = torch.zeros(8, 4, dtype=tensor.dtype, device=tensor.device)
        padded[1:7] = tensor
        getattr(self, name).data.copy_(padded[2:])


class FillsPadding(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        weight = getattr(self, name).data
        weight[:4].copy_(tensor[:4])
        weight[4:].fill_(0)


class Interleaves(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor.view(2, 3, 4).transpose(0, 1).reshape(6, 4))


class CopiesAWeight(Model):
    """Writes a weight from another weight, as a tied head's loader does."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load("c", tensor)
        if name == "c":
            self.a.data.copy_(self.c.data)
            self.b.data.copy_(self.c.data)


class HasAScalar(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor)
        if name == "b":
            default_weight_loader(self.gate, tensor[1, 2].reshape(1))


@pytest.mark.parametrize(
    "of",
    [Model, Holds, Casts, Pads, FillsPadding, Interleaves, HasAScalar],
    ids=lambda of: of.__name__,
)
def test_moves_give_what_a_fresh_load_gives(of: type[Model]) -> None:
    found = assert_planned_or_named(of(), checkpoint(0), checkpoint(1))
    assert not found.unplanned


def test_cast_on_the_way_rounds_as_the_loader_does() -> None:
    tensors = checkpoint(0, torch.float32)
    found = assert_planned_or_named(Casts(torch.bfloat16), tensors, checkpoint(1, torch.float32))
    (planned,) = found.moves["a"]
    assert planned.through == (torch.float16, torch.float32)
    assert not found.unplanned


def test_tensors_that_overwrite_each_other_are_unplanned() -> None:
    found = assert_planned_or_named(CopiesAWeight(), checkpoint(0), checkpoint(1))
    assert found.unplanned.keys() == set(NAMES)


class Negates(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, -tensor if name == "b" else tensor)


class WritesIntoWhatItGets(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor.add_(1) if name == "b" else tensor)


class AddsToAWeight(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor)
        if name == "b":
            self.b.data.add_(1)


class DecidesByAValue(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor.flip(0) if name == "b" and tensor.sum().item() > 0 else tensor)


class FillsByItsOwnNumber(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor)
        if name == "b":
            self.gate.data.fill_(2 * tensor[0, 0].item())


class ReplacesAWeight(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b":
            self.b = nn.Parameter(tensor.clone(), requires_grad=False)
        else:
            super().load(name, tensor)


class PicksByATensor(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        order = tensor[:, 0].argsort() if name == "b" else torch.arange(6)
        super().load(name, tensor[order])


class ReadsAnotherDtype(Model):
    """Takes bits of bfloat16 for those of float16. Zeros are the same in both."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor.view(torch.float16) if name == "b" else tensor)


class WritesBytes(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b":
            self.b.data.view(torch.uint8)[:3, :4].copy_(tensor.view(torch.uint8)[:3, :4])
        else:
            super().load(name, tensor)


class FillsBytes(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor)
        if name == "b":
            self.b.data.view(torch.uint8)[:, 0] = 0


class MovesBytes(Model):
    """Swaps the two bytes of each element by a buffer in between."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b":
            buffer = torch.empty_like(tensor).view(torch.uint8)
            buffer.copy_(tensor.view(torch.uint8))
            tensor = torch.stack([buffer[:, 1::2], buffer[:, ::2]], dim=2).view(DTYPE).squeeze(2)
        super().load(name, tensor)


class ViewsItsBuffer(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b":
            buffer = torch.empty_like(tensor)
            buffer.copy_(tensor)
            tensor = buffer.view(torch.float16)
        super().load(name, tensor)


@pytest.mark.parametrize(
    "of",
    [
        Negates,
        ReadsAnotherDtype,
        WritesBytes,
        FillsBytes,
        MovesBytes,
        ViewsItsBuffer,
        WritesIntoWhatItGets,
        AddsToAWeight,
        DecidesByAValue,
        FillsByItsOwnNumber,
        PicksByATensor,
    ],
    ids=lambda of: of.__name__,
)
def test_tensor_that_is_more_than_moved_is_unplanned(of: type[Model]) -> None:
    found = assert_planned_or_named(of(), checkpoint(0), checkpoint(1))
    assert found.unplanned.keys() == {"b"}
    assert found.moves.keys() == {"a", "c"}


class ViewsAndReturns(Model):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        weight = getattr(self, name).data
        weight.view(torch.uint8).view(DTYPE).copy_(tensor.view(torch.uint8).view(DTYPE))


def test_view_of_another_dtype_that_is_viewed_back_moves() -> None:
    found = assert_planned_or_named(ViewsAndReturns(), checkpoint(0), checkpoint(1))
    assert found.moves.keys() == set(NAMES)


def test_weight_that_the_loader_replaces_is_named() -> None:
    model = ReplacesAWeight()
    found = recorded(model, checkpoint(0))
    assert found.unplanned == {"b": "the loader makes b"}


def test_loader_that_zeroes_served_memory_leaves_it_as_it_is() -> None:
    class Zeroes(Model):
        def load(self, name: str, tensor: torch.Tensor) -> None:
            served.zero_()

    model = Zeroes()
    served = model.a.data.fill_(1.0)
    assert "writes 'a' where it is being served" in recorded(model, checkpoint(1)).unplanned["b"]
    assert model.a.eq(1.0).all()


def test_loader_that_fails_without_memory_has_no_plan_and_says_why() -> None:
    class Fails(Model):
        def load_weights(self, weights: Weights) -> None:
            raise KeyError("no such layer")

    found = recorded(Fails(), checkpoint(0))
    assert not found.moves
    assert found.unplanned.keys() == set(NAMES)
    assert "no such layer" in found.unplanned["a"]


# ---- random loaders --------------------------------------------------------------------


class Random(Model):
    """Runs steps that hypothesis chose."""

    def __init__(self, steps: list[Any]) -> None:
        super().__init__()
        self.steps = steps

    def load_weights(self, weights: Weights) -> None:
        got = dict(weights)
        for name in NAMES:
            getattr(self, name).data.fill_(7)
        for of, other, to, how, at in self.steps:
            _STEPS[how](got[of], got[other], getattr(self, to).data, at)


def _cat(one: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, at: int) -> None:
    weight.copy_(torch.cat([one[:at], other[at:]]))


def _columns(one: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, at: int) -> None:
    weight.copy_(torch.cat([one[:, : at % 4], other[:, at % 4 :]], dim=1))


def _rows(one: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, at: int) -> None:
    weight.narrow(0, at, 6 - at).copy_(one.narrow(0, 0, 6 - at))


def _transposed(one: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, at: int) -> None:
    weight.view(4, 6).t().copy_(other.reshape(6, 4))


def _cast(one: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, at: int) -> None:
    weight[at:].copy_(other.to(torch.float16)[at:])


def _computed(one: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, at: int) -> None:
    weight[at:].copy_(one[at:] + other[at:])


def _index(one: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, at: int) -> None:
    weight.copy_(one.index_select(0, torch.tensor([at, 0, 1, 2, 3, 4])))


def _broadcast(one: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, at: int) -> None:
    weight.copy_(one[at])


def _every_second(one: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, at: int) -> None:
    weight[::2].copy_(one[1::2])


_STEPS = (
    _cat, _columns, _rows, _transposed, _cast, _computed, _index, _broadcast, _every_second,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.sampled_from(NAMES),
            st.sampled_from(NAMES),
            st.integers(0, len(_STEPS) - 1),
            st.integers(0, 5),
        ),
        max_size=4,
    )
)
def test_random_loader_has_right_moves_or_a_reason(steps: list[Any]) -> None:
    assert_planned_or_named(Random(steps), checkpoint(0), checkpoint(1))


# ---- geometry --------------------------------------------------------------------------


def test_equal_copies_are_equal_moves() -> None:
    whole = torch.empty(6, 4)
    one = move(Box.of(whole), Box.of(whole))
    other = move(Box.of(whole.view(2, 12)), Box.of(whole.view(2, 12)))
    assert one == other == move(Box.of(whole.t()), Box.of(whole.t()))
    assert one.sizes == (24,)


def test_addresses_of_two_tensors_become_two_moves() -> None:
    weight = torch.empty(6, 4)
    found = torch.cat([addresses(0, Box.of(weight[:2])), addresses(5, Box.of(weight[2:]))])
    moves = sorted(moves_of(found, Box.of(weight)))
    assert [(number, each.numel) for number, each in moves] == [(0, 8), (5, 16)]


def test_constants_are_no_tensors() -> None:
    weight = torch.empty(3)
    found = torch.tensor([CONSTANT, CONSTANT, 1])
    moves = dict(moves_of(found, Box.of(weight)))
    assert moves.keys() == {None, 0}
    assert moves[None].target == Box(0, (2,), (1,))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (Box(0, (4,), (1,)), Box(4, (4,), (1,)), False),
        (Box(0, (4,), (1,)), Box(3, (4,), (1,)), True),
        (Box(0, (4,), (2,)), Box(1, (4,), (2,)), False),
        (Box(0, (4,), (2,)), Box(2, (1,), (1,)), True),
        (Box(0, (2, 3), (8, 1)), Box(3, (2, 3), (8, 1)), False),
        (Box(0, (0,), (1,)), Box(0, (4,), (1,)), False),
    ],
)
def test_overlap_is_seen_and_neighbours_are_not(one: Box, other: Box, expected: bool) -> None:
    assert overlap([one, other]) is expected


# ---- plans -----------------------------------------------------------------------------


@torch.no_grad()
def planned(model: Model, tensors: Tensors) -> tuple[Plan, Tensors]:
    model.load_weights(tensors.items())
    kinds = {name: Kind(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    weights: Tensors = dict(model.named_parameters())
    return Plan.of(record(model, kinds), kinds, weights), weights


def nothing() -> None:
    """Never give up."""


def test_served_checkpoint_proves_all_of_a_plan() -> None:
    tensors = checkpoint(0)
    plan, weights = planned(Holds(), tensors)
    plan.prove(tensors.items(), weights, nothing, UNPACED)
    assert plan.needed == set(NAMES)
    assert not plan.by_loader


class RequiresAll(Model):
    """Negates ``b``, and takes no part of a checkpoint."""

    def load_weights(self, weights: Weights) -> None:
        loaded = set[str]()
        for name, tensor in weights:
            self.load(name, -tensor if name == "b" else tensor)
            loaded.add(name)
        if missing := {*NAMES} - loaded:
            raise RuntimeError(f"some parameters are not loaded: {sorted(missing)}")


@torch.no_grad()
def test_loader_that_takes_no_part_alone_gets_all_tensors() -> None:
    """With its own tensors alone it would refuse each update."""
    model, tensors = RequiresAll(), checkpoint(0)
    model.load_weights(tensors.items())
    kinds = {name: Kind(tuple(t.shape), t.dtype) for name, t in tensors.items()}

    def read(needed: Container[str]) -> Weights:
        return tensors.items()

    weights = dict(model.named_parameters())
    plan = find_plan(model, weights, kinds, None, lambda: True, read, nothing, UNPACED)
    assert not plan.moves
    assert plan.by_loader.keys() == set(NAMES)
    assert "not loaded: ['a', 'c']" in plan.by_loader["a"]


def test_weight_that_is_not_what_its_moves_give_goes_by_the_loader() -> None:
    """Post-processing, a kernel or another thread may have written it."""
    tensors = checkpoint(0)
    plan, weights = planned(Model(), tensors)
    with torch.no_grad():
        weights["b"].view(-1)[5] += 1
    plan.prove(tensors.items(), weights, nothing, UNPACED)
    assert plan.by_loader.keys() == {"b"}
    assert plan.needed == {"a", "c"}


def test_tensors_that_the_loader_holds_for_each_other_are_named_by_one_set() -> None:
    together = {"a": "a", "b": "a", "c": "c", "late": None}
    plan = Plan({}, {}, {}, together)
    assert plan.unit_of("a") == {"a", "b"}
    assert plan.unit_of("b") is plan.unit_of("a")
    assert [plan.unit_of(name) for name in ("c", "late", "other")] == [{"c"}, {"late"}, {"other"}]


def test_weights_that_share_a_tensor_go_by_the_loader_together() -> None:
    tensors = checkpoint(0)
    plan, weights = planned(Holds(), tensors)
    with torch.no_grad():
        weights["a"].view(-1)[0] += 1
    plan.prove(tensors.items(), weights, nothing, UNPACED)
    assert plan.by_loader.keys() == {"a", "b"}
    assert plan.moves.keys() == {"c"}


@pytest.mark.parametrize("other", ["missing", "dtype"])
def test_tensor_that_does_not_come_as_planned_proves_nothing(other: str) -> None:
    tensors = checkpoint(0)
    plan, weights = planned(Model(), tensors)
    came = {n: t for n, t in tensors.items() if n != "b"}
    if other == "dtype":
        came["b"] = tensors["b"].float()
    plan.prove(came.items(), weights, nothing, UNPACED)
    assert plan.by_loader.keys() == {"b"}


def test_weight_with_holes_goes_by_the_loader() -> None:
    model = Model()
    model.b = nn.Parameter(torch.zeros(6, 8, dtype=DTYPE)[:, ::2], requires_grad=False)
    plan, _ = planned(model, checkpoint(0))
    assert plan.by_loader.keys() == {"b"}
