"""A model's loader addresses scratch memory, and the update is as if it wrote the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sglang_inflight.scheduler.update.changes.recording import Budget, Recording
from sglang_inflight.scheduler.update.checks.dataflow import Dataflow
from sglang_inflight.scheduler.update.forms import Changes, Form, WholeCopies
from sglang_inflight.scheduler.update.loaded_model import LoadedModel
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.swap import PreparedSwap, swap_for
from sglang_inflight.vocabulary.errors import Refused
from tests.unit.test_changes import DTYPES, SHAPES, are_same, served_values, whole_copies, writes_to

CPU = torch.device("cpu")
FORMS = pytest.mark.parametrize("form", ["changes", "whole copies"])
Write = Callable[[list[torch.Tensor]], object]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Turn gradients off, like the staging thread."""
    with torch.no_grad():
        yield


class Rank:
    """Weights, in a form of staging, with the scratch memory of a loader."""

    def __init__(
        self,
        form: str,
        weights: list[torch.Tensor],
        *,
        keeps: bool,
        open_bytes: int = 1 << 20,
        foreign: tuple[str, ...] = (),
        check_finite: bool = False,
        at_seal: Write | None = None,
    ) -> None:
        """``at_seal``: what the model recomputes of the weights."""
        model: Any = nn.Module()
        model.weights = nn.ParameterList(nn.Parameter(w, requires_grad=False) for w in weights)
        if at_seal is not None:
            # a method of SGLang's ``GemmaRMSNorm``
            model.refresh_gemma_weight = lambda: at_seal(self._given)
        self.weights: list[torch.Tensor] = [*model.parameters()]
        swap = swap_for(CPU)
        self.form: Form
        if form == "changes":
            self.form = Changes(Recording(Budget(), UNPACED), swap, UNPACED)
        else:
            self.form = WholeCopies(StagingMode.DEVICE, swap, UNPACED, torch.empty_like)
        self.scratch = LoadedModel(
            model, foreign, self.form, UNPACED, open_bytes, check_finite=check_finite
        )
        self.form.begin()
        for weight in self.scratch.weights:
            self.form.expect(weight, keeps=True)
        self.scratch.begin(None, is_partial=keeps)
        self.scratch.restore()

    def load(self, *writes: Write) -> None:
        """Make ``writes`` like a loader, each given what stands for the weights."""
        targets = self.scratch.targets()
        with Dataflow(targets, before_write=lambda write: None, recorder=self.scratch):
            for write in writes:
                write(self._given)
        self.scratch.end_call()

    @property
    def _given(self) -> list[torch.Tensor]:
        return [own for _, _, own in self.scratch._shadow.pairs]

    def seal(self) -> PreparedSwap:
        self.scratch.seal(was_loaded=True)
        return self.form.prepare([*self.scratch.weights])


@FORMS
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_update_is_as_if_the_loader_wrote_the_weights(form: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    is_whole = data.draw(st.booleans())
    writes = data.draw(whole_copies(dtype)) if is_whole else []
    writes += data.draw(st.lists(writes_to(dtype), max_size=8))
    served = [served_values(which, dtype) for which in range(len(SHAPES))]
    expected = [weight.clone() for weight in served]
    for write in writes:
        write(expected)
    open_bytes = data.draw(st.sampled_from([0, 100, 1 << 20]))
    rank = Rank(form, [w.clone() for w in served], keeps=not is_whole, open_bytes=open_bytes)
    calls = data.draw(st.integers(0, len(writes)))
    rank.load(*writes[:calls])
    rank.load(*writes[calls:])
    swap = rank.seal()
    assert all(map(are_same, rank.weights, served)), "the served weights were written"
    for weights in (expected, served, expected):
        swap.make()
        assert all(map(are_same, rank.weights, weights))


def copies(at: int, value: float, start: int = 0, end: int | None = None) -> Write:
    return lambda weights: weights[at][start:end].copy_(
        torch.full_like(weights[at][start:end], value)
    )


@FORMS
def test_element_of_a_whole_update_is_not_read_before_it_comes(form: str) -> None:
    def joins(weights: list[torch.Tensor]) -> object:
        return weights[1].copy_(weights[0] * 2)

    rank = Rank(form, [torch.zeros(4), torch.zeros(4)], keeps=False)
    rank.load(copies(0, 1.0, 0, 3))
    with pytest.raises(Refused, match=r"computes with 'weights\.0' before its elements are sent"):
        rank.load(joins)
    rank = Rank(form, [torch.zeros(4), torch.zeros(4)], keeps=False)
    rank.load(copies(0, 1.0, 0, 3), copies(0, 3.0, 3), joins)
    rank.seal().make()
    assert rank.weights[1].tolist() == [2.0, 2.0, 2.0, 6.0]


@FORMS
@pytest.mark.parametrize(
    "like", [torch.zeros_like, torch.empty_like, lambda weight: weight.new_zeros(4)]
)
def test_shape_of_a_weight_is_read_at_any_time(
    form: str, like: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    rank = Rank(form, [torch.zeros(4)], keeps=False)
    rank.load(lambda weights: weights[0].copy_(like(weights[0]).fill_(2)))
    rank.seal().make()
    assert rank.weights[0].tolist() == [2.0] * 4


@FORMS
def test_element_of_a_partial_update_is_read_as_it_will_be_served(form: str) -> None:
    rank = Rank(form, [torch.zeros(4), torch.zeros(4)], keeps=True)
    rank.load(copies(0, 1.0, 0, 3), lambda weights: weights[1].copy_(weights[0] + 1))
    rank.seal().make()
    assert rank.weights[1].tolist() == [2.0, 2.0, 2.0, 1.0]


@FORMS
@pytest.mark.parametrize("writes_all", [False, True])
def test_operation_on_its_own_elements_needs_them(form: str, writes_all: bool) -> None:
    rank = Rank(form, [torch.zeros(4)], keeps=False)

    def adds(weights: list[torch.Tensor]) -> object:
        return weights[0].add_(torch.ones(4))

    if writes_all:
        rank.load(lambda weights: weights[0].zero_(), adds)
        rank.seal().make()
        assert rank.weights[0].tolist() == [1.0] * 4
    else:
        with pytest.raises(Refused, match="before its elements are sent"):
            rank.load(adds)


@FORMS
def test_weight_of_another_model_is_not_read_while_its_update_may_change_it(form: str) -> None:
    weights = [torch.zeros(4), torch.zeros(4)]

    def adds(given: list[torch.Tensor]) -> object:
        return given[1].copy_(given[0] + 1)

    rank = Rank(form, weights, keeps=True, foreign=("weights.0",), at_seal=adds)
    with pytest.raises(Refused, match="another model's update"):
        rank.load(adds)
    # its own loader writes it
    rank.load(copies(0, 7.0))
    rank.seal().make()
    assert [w.tolist() for w in rank.weights] == [[0.0] * 4, [1.0] * 4]


@FORMS
@pytest.mark.parametrize("whole", [False, True])
def test_not_a_number_that_a_loader_makes_is_refused(form: str, whole: bool) -> None:
    rank = Rank(form, [torch.ones(4)], keeps=True, check_finite=True)

    def computes(weights: list[torch.Tensor]) -> object:
        made = torch.zeros(4) / torch.zeros(4)
        return weights[0].copy_(made) if whole else weights[0].index_copy_(0, _ALL, made)

    with pytest.raises(Refused, match=r"leaves NaN in 'weights\.0'"):
        rank.load(computes)


_ALL = torch.arange(4)


@FORMS
def test_elements_written_by_positions_and_then_by_a_copy_are_staged_once(form: str) -> None:
    """An exchange of an element that is staged twice does not undo itself."""
    rank = Rank(form, [torch.zeros(6)], keeps=True)
    at = torch.tensor([1, 4])
    rank.load(lambda weights: weights[0].index_copy_(0, at, torch.ones(2)))
    rank.load(copies(0, 5.0, 0, 3))
    swap = rank.seal()
    for expected in ([5.0, 5.0, 5.0, 0.0, 1.0, 0.0], [0.0] * 6, [5.0, 5.0, 5.0, 0.0, 1.0, 0.0]):
        swap.make()
        assert rank.weights[0].tolist() == expected


@FORMS
def test_dropped_update_leaves_nothing_in_scratch_memory(form: str) -> None:
    rank = Rank(form, [torch.zeros(4)], keeps=True)
    given = rank._given
    with Dataflow(rank.scratch.targets(), before_write=lambda write: None, recorder=rank.scratch):
        given[0].index_copy_(0, _ALL, torch.ones(4))
    rank.scratch.forget()
    rank.form.begin()
    for weight in rank.scratch.weights:
        rank.form.expect(weight, keeps=True)
    rank.scratch.begin(None, is_partial=True)
    rank.seal().make()
    assert rank.weights[0].tolist() == [0.0] * 4
