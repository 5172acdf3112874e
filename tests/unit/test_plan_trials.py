"""A plan is proven by its model's loader where no checkpoint is served."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from sglang_inflight.scheduler.plans import finding, trial
from sglang_inflight.scheduler.plans.moves import Move
from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.plans.record import Kind, record
from sglang_inflight.scheduler.plans.remembered import recall
from sglang_inflight.scheduler.plans.trial import prove_by_loader, random_row
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.vocabulary.errors import Dropped
from tests.support.rank import CPU, Rank
from tests.unit.test_load_plans import (
    _STEPS,
    DTYPE,
    NAMES,
    SHAPE,
    Casts,
    FillsPadding,
    HasAScalar,
    Holds,
    Interleaves,
    Model,
    Pads,
    Random,
    Tensors,
    Weights,
    checkpoint,
)

GIB = 1 << 30
KINDS = {name: Kind(SHAPE, DTYPE) for name in NAMES}


def nothing() -> None:
    """Never give up."""


def plan_of(model: nn.Module, kinds: dict[str, Kind] = KINDS) -> Plan:
    return Plan.of(record(model, kinds), kinds, dict(model.named_parameters()))


def tried(model: nn.Module, plan: Plan, host_bytes: int = GIB) -> bool:
    return prove_by_loader(plan, model, nothing, UNPACED, host_bytes)


class LoadsAtItsEnd(Model):
    def load_weights(self, weights: Weights) -> None:
        for name, tensor in dict(weights).items():
            self.load(name, tensor)


class HoldsForAComputedOne(Model):
    """Writes a tensor with the next one, with which it computes."""

    def load_weights(self, weights: Weights) -> None:
        got: Tensors = {}
        for name, tensor in weights:
            got[name] = tensor
            if name == "b":
                self.a.data.copy_(got["a"])
                self.b.data.copy_(tensor.neg())
            elif name == "c":
                self.c.data.copy_(tensor)


@pytest.mark.parametrize(
    "of",
    [
        Model, Holds, Casts, Pads, FillsPadding, Interleaves, HasAScalar, LoadsAtItsEnd,
        HoldsForAComputedOne,
    ],
    ids=lambda of: of.__name__,
)  # fmt: skip
def test_loader_proves_the_moves_that_were_recorded_from_it(of: type[Model]) -> None:
    model = of()
    plan = plan_of(model)
    needed = plan.needed
    assert tried(model, plan)
    assert plan.needed == needed
    assert needed == set(NAMES) - ({"b"} if of is HoldsForAComputedOne else set())
    assert all(not weight.any() for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int8, torch.bool])
def test_casts_and_narrow_dtypes_are_proven(dtype: torch.dtype) -> None:
    kinds = dict.fromkeys(NAMES, Kind(SHAPE, dtype))
    model = Model()
    plan = plan_of(model, kinds)
    assert tried(model, plan)
    assert plan.needed == set(NAMES)


def wrong(plan: Plan, name: str, **other: Any) -> None:
    """Let the first move of ``name`` be another than the loader's."""
    (planned,) = plan.moves[name]
    plan.moves[name] = (replace(planned, move=planned.move._replace(**other)),)


@pytest.mark.parametrize(
    "other",
    [
        {"of": 1, "sizes": (23,), "of_strides": (1,), "to_strides": (1,)},
        {"to": 1, "sizes": (23,), "of_strides": (1,), "to_strides": (1,)},
        {"sizes": (6, 4), "of_strides": (1, 6), "to_strides": (4, 1)},
    ],
    ids=["from elsewhere", "to elsewhere", "transposed"],
)
def test_wrong_move_leaves_its_weight_to_the_loader(other: dict[str, Any]) -> None:
    model = Model()
    plan = plan_of(model)
    assert plan.moves["b"][0].move == Move((24,), 0, (1,), 0, (1,))
    wrong(plan, "b", **other)
    # another server would find the same
    assert tried(model, plan)
    assert plan.by_loader.keys() == {"b"}
    assert plan.needed == {"a", "c"}


def test_move_without_the_loaders_cast_is_not_proven() -> None:
    kinds = dict.fromkeys(NAMES, Kind(SHAPE, torch.float32))
    model = Casts()
    plan = plan_of(model, kinds)
    plan.moves["b"] = (replace(plan.moves["b"][0], through=()),)
    assert tried(model, plan)
    assert plan.by_loader.keys() == {"b"}


class Fails(Model):
    """Cannot load one tensor that has memory."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b" and not tensor.is_meta:
            raise KeyError("no such layer")
        super().load(name, tensor)


def test_loader_that_fails_at_one_tensor_proves_the_others() -> None:
    model = Fails()
    plan = plan_of(model)
    assert not tried(model, plan)
    assert plan.needed == {"a", "c"}
    assert "no such layer" in plan.by_loader["b"]


class StopsEarly(Model):
    """Takes no tensor that has memory."""

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if not tensor.is_meta:
                return
            self.load(name, tensor)


class TakesNone(Model):
    def load_weights(self, weights: Weights) -> None:
        if self.a.is_meta:
            super().load_weights(weights)


@pytest.mark.parametrize("of", [StopsEarly, TakesNone], ids=lambda of: of.__name__)
def test_loader_that_does_not_take_its_tensors_proves_nothing(of: type[Model]) -> None:
    model = of()
    plan = plan_of(model)
    tried(model, plan)
    assert plan.by_loader.keys() == set(NAMES)


def test_loader_that_always_fails_is_not_asked_for_each_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial, "_MOST_FAILURES", 2)
    calls = 0

    class Always(Model):
        def load_weights(self, weights: Weights) -> None:
            nonlocal calls
            calls += 1
            for name, tensor in weights:
                if not tensor.is_meta:
                    raise RuntimeError("never")
                self.load(name, tensor)

    model = Always()
    plan = plan_of(model)
    calls = 0
    assert not tried(model, plan)
    assert calls == 2
    assert plan.by_loader.keys() == set(NAMES)


def test_tensor_that_takes_too_much_memory_goes_by_the_loader() -> None:
    model = Model()
    kinds = KINDS | {"gate": Kind((1,), DTYPE)}
    plan = plan_of(model, kinds)
    assert not tried(model, plan, host_bytes=6)
    assert plan.needed == {"gate"}
    assert "host memory" in plan.by_loader["a"]


def test_memory_is_given_back_between_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_MOST_BYTES", 0)
    model = Holds()
    plan = plan_of(model)
    assert tried(model, plan)
    assert plan.needed == set(NAMES)


def test_dropped_search_ends_within_the_loader() -> None:
    model = LoadsAtItsEnd()
    asked = iter([None, None, Dropped("")])

    def check() -> None:
        if (error := next(asked, Dropped(""))) is not None:
            raise error

    with pytest.raises(Dropped):
        prove_by_loader(plan_of(model), model, check, UNPACED, GIB)


@settings(max_examples=100, deadline=None)
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
def test_moves_of_a_random_loader_are_proven_by_it(steps: list[Any]) -> None:
    model = Random(steps)
    plan = plan_of(model)
    needed = plan.needed
    assert tried(model, plan)
    assert plan.needed == needed


# ---- the search ------------------------------------------------------------------------


class Searching:
    """A rank that looks for its plan, and has ``on_disk`` for a checkpoint of its kinds."""

    def __init__(self, on_disk: Tensors, *, load_format: str = "auto") -> None:
        self.model = Model()
        self.model.load_weights(checkpoint(0).items())
        self.rank = Rank(
            StagingMode.CHANGES,
            self.model,
            checkpoint_shapes=dict.fromkeys(NAMES, SHAPE),
            load_format=load_format,
        )
        findings: Any = self.rank.shadowed.findings
        findings._kinds = KINDS
        findings._name_recipe = lambda pristine, layout: "name"
        findings._read_start_checkpoint = lambda check, rate_limit, wants: self._read(on_disk)
        self.reads = 0

    def _read(self, on_disk: Tensors) -> Iterable[tuple[str, torch.Tensor]]:
        self.reads += 1
        return iter(on_disk.items())

    @property
    def planned(self) -> int:
        self.rank.shadowed.findings.find_plan(CPU, nothing, UNPACED, {})
        assert self.rank.shadowed.findings.ways is not None
        return self.rank.shadowed.findings.ways.planned["tensors"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_INFLIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(finding, "available_to_this_rank", lambda: GIB)


@torch.no_grad()
def test_server_with_random_weights_has_a_plan_and_updates_by_it() -> None:
    served = Searching(checkpoint(1), load_format="dummy")
    assert (served.planned, served.reads) == (3, 0)
    served.rank.update(checkpoint(2))
    for name, tensor in checkpoint(2).items():
        assert torch.equal(getattr(served.model, name), tensor)
    # a server with the same checkpoint need not look for it
    assert Searching(checkpoint(0)).planned == 3


@torch.no_grad()
def test_server_whose_weights_were_replaced_has_a_plan() -> None:
    served = Searching(checkpoint(1))
    served.rank.shadowed.note_commit(rolls_back=True)
    assert (served.planned, served.reads) == (3, 0)


@torch.no_grad()
def test_plan_that_failed_by_what_is_served_is_not_remembered() -> None:
    """The folder may have got another checkpoint, whose server would recall that plan."""
    served = Searching(checkpoint(1))
    assert (served.planned, served.reads) == (0, 1)
    assert recall("name") is None
    assert Searching(checkpoint(0)).planned == 3


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8]
)
def test_random_content_is_large_and_small_and_no_nan(dtype: torch.dtype) -> None:
    row = random_row(1 << 14, dtype, torch.Generator().manual_seed(0), UNPACED).float()
    assert row.isfinite().all()
    assert row.max() > 100
    assert row.abs().min() < 1
