"""A model written in place keeps the addresses held by captured graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sglang_inflight.scheduler.update.in_place import InPlaceModel
from sglang_inflight.vocabulary.errors import Refused
from tests.unit.finishing import Finish, Finishing


def made(finish: Finish) -> Any:
    model: Any = nn.Module()
    model.layer = nn.Module()
    model.layer.weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    model.layer.quant_method = Finishing(finish)
    finish(model.layer)
    return model


def derive(layer: Any) -> None:
    """Assign a new product, like Kimi-Linear."""
    layer.w_kc = layer.weight.data * 2


def derive_a_list(layer: Any) -> None:
    layer.args = [layer.weight.data * 2, 3]


def replace_the_parameter(layer: Any) -> None:
    layer.derived = nn.Parameter(layer.weight.data * 2, requires_grad=False)


def as_large_as_it_is(layer: Any) -> None:
    layer.w_kc = torch.zeros(int(layer.weight[0, 0]))


def forget(layer: Any) -> None:
    layer.w_kc = torch.ones(2) if layer.weight[0, 0] == 1 else None


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Turn gradients off, like the staging thread."""
    with torch.no_grad():
        yield


def update(model: Any, *, holds_graphs: bool) -> None:
    in_place = InPlaceModel(model, torch.device("cpu"), finishes=True, holds_graphs=holds_graphs)
    in_place.begin(None, is_partial=False)
    in_place.restore()
    model.layer.weight.data.fill_(3.0)
    in_place.seal(was_loaded=True)


def tensors_of(model: Any) -> list[torch.Tensor]:
    layer = model.layer
    found = [layer.weight, getattr(layer, "w_kc", None), getattr(layer, "derived", None)]
    return [
        each for each in (*found, *getattr(layer, "args", ())) if isinstance(each, torch.Tensor)
    ]


@pytest.mark.parametrize("finish", [derive, derive_a_list, replace_the_parameter])
def test_graphs_read_the_new_value_at_the_old_address(finish: Finish) -> None:
    model = made(finish)
    seen_by_graphs = [tensor.detach() for tensor in tensors_of(model)]
    update(model, holds_graphs=True)
    assert [tensor[0, 0].item() for tensor in seen_by_graphs] == [3.0, 6.0]
    assert [t.data_ptr() for t in tensors_of(model)] == [t.data_ptr() for t in seen_by_graphs]


@pytest.mark.parametrize("finish", [as_large_as_it_is, forget])
def test_moved_tensor_is_refused_with_cuda_graphs(finish: Finish) -> None:
    with pytest.raises(Refused, match=r"moved 'layer\.w_kc', and captured CUDA graphs"):
        update(made(finish), holds_graphs=True)


@pytest.mark.parametrize("finish", [as_large_as_it_is, forget])
def test_moved_tensor_is_accepted_without_graphs(finish: Finish) -> None:
    model = made(finish)
    update(model, holds_graphs=False)
    assert model.layer.w_kc is None or len(model.layer.w_kc) == 3


def test_model_written_by_an_update_shows_it_after_its_finishing() -> None:
    """A dropped update may have come to its end: its weights must not be served."""
    in_place = InPlaceModel(made(derive), torch.device("cpu"), finishes=True, holds_graphs=False)
    in_place.begin(None, is_partial=False)
    assert not in_place.was_written
    in_place.restore()
    in_place.seal(was_loaded=True)
    assert in_place.was_written
    in_place.begin(None, is_partial=False)
    assert not in_place.was_written


def test_update_of_a_half_written_model_shows_its_own_writes() -> None:
    in_place = InPlaceModel(made(derive), torch.device("cpu"), finishes=True, holds_graphs=False)
    in_place.begin(None, is_partial=False)
    in_place.open()
    in_place.begin(None, is_partial=False)
    assert not in_place.was_written
    in_place.open()
    assert in_place.was_written
