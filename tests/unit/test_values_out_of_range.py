"""A value that a weight's dtype cannot hold is refused by name, however a loader writes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sglang_inflight.messages import DIRECT, SPARSE
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.vocabulary.errors import Refused
from tests.support.pool import MASKING_LOADER
from tests.support.rank import Rank

pytestmark = pytest.mark.usefixtures("either_way")

Tensors = dict[str, torch.Tensor]

SHAPES = {"short": (4,), "brain": (4,), "wide": (4,), "cast": (4,), "q": (2, 2), "k": (2, 2)}
EVERY_MODE = pytest.mark.parametrize(
    "mode", [StagingMode.DEVICE, StagingMode.CHANGES, StagingMode.OFF]
)


class Model(nn.Module):
    """Its loader copies, casts before it copies, and holds one half of a fused weight."""

    def __init__(self) -> None:
        super().__init__()
        self.short = parameter(torch.float16, 4)
        self.brain = parameter(torch.bfloat16, 4)
        # such as a router's bias
        self.wide = parameter(torch.float32, 4)
        self.cast = parameter(torch.float16, 4)
        self.qk = parameter(torch.float16, 4, 2)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        held: Tensors = {}
        for name, tensor in weights:
            if name == "cast":
                self.cast.data.copy_(tensor.to(torch.float16))
            elif name in ("q", "k"):
                held[name] = tensor
                if held.keys() == {"q", "k"}:
                    self.qk.data.copy_(torch.cat([held.pop("q"), held.pop("k")]))
            else:
                getattr(self, name).data.copy_(tensor)


def parameter(dtype: torch.dtype, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def rank_of(mode: StagingMode) -> Rank:
    return Rank(mode, Model(), checkpoint_shapes=SHAPES)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


TOO_LARGE = [
    ("short", torch.bfloat16, 1e5),
    ("short", torch.float32, -65520.0),
    ("short", torch.float64, 1e300),
    ("brain", torch.float32, 3.4e38),
    ("brain", torch.float64, -1e300),
    ("wide", torch.float64, 1e300),
    ("cast", torch.bfloat16, 1e5),
]


@EVERY_MODE
@pytest.mark.parametrize(("name", "dtype", "value"), TOO_LARGE)
def test_value_beyond_the_served_dtype_is_refused(
    mode: StagingMode, name: str, dtype: torch.dtype, value: float
) -> None:
    rank = rank_of(mode)
    sent = torch.ones(4, dtype=dtype)
    sent[2] = value
    with pytest.raises(Refused, match=f"tensor '{name}' holds .* parameter '{name}' is torch"):
        rank.update({name: sent}, partial=True)
    assert getattr(rank.model, name).tolist() == [0.0] * 4


@pytest.mark.parametrize("load_format", [DIRECT, MASKING_LOADER])
def test_value_beyond_the_served_dtype_is_refused_past_the_models_loader(load_format: str) -> None:
    rank = rank_of(StagingMode.CHANGES)
    sent = {"short": torch.tensor([1.0, 1e5, 1.0, 1.0])}
    if load_format == MASKING_LOADER:
        sent = sparse_of("short", 1, torch.tensor(1e5)) | {"short.shape": torch.tensor([4])}
    with pytest.raises(Refused, match=r"parameter 'short' is torch\.float16"):
        rank.update(sent, partial=True, load_format=load_format)


def sparse_of(name: str, index: int, value: torch.Tensor) -> Tensors:
    return {f"{name}.indices": torch.tensor([index]), f"{name}.values": value.view(1)}


def test_sparse_value_beyond_the_served_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rank, "plans", True)
    rank = rank_of(StagingMode.CHANGES)
    with pytest.raises(Refused, match=r"tensor 'short' holds .* 'short' is torch\.float16"):
        rank.update(sparse_of("short", 2, torch.tensor(1e5)), partial=True, load_format=SPARSE)


@EVERY_MODE
def test_value_that_the_loader_holds_for_a_later_call_is_refused(mode: StagingMode) -> None:
    rank = rank_of(mode)
    with pytest.raises(Refused, match="tensor 'q' holds a value of magnitude 100000"):
        rank.update({"q": torch.full((2, 2), 1e5)}, {"k": torch.ones(2, 2)}, partial=True)


@EVERY_MODE
def test_value_that_rounds_to_the_largest_one_is_served(mode: StagingMode) -> None:
    rank = rank_of(mode)
    most_of_bfloat16 = torch.finfo(torch.bfloat16).max
    rank.update(
        {
            "short": torch.full((4,), 65519.0),
            "brain": torch.full((4,), most_of_bfloat16, dtype=torch.float64),
            "wide": torch.full((4,), 1e38, dtype=torch.float64),
        },
        partial=True,
    )
    model: Any = rank.model
    assert model.short.tolist() == [65504.0] * 4
    assert model.brain.tolist() == [most_of_bfloat16] * 4
    assert model.wide.isfinite().all()


@EVERY_MODE
def test_large_value_of_a_weight_kept_in_float32_is_served(mode: StagingMode) -> None:
    rank = rank_of(mode)
    rank.update({"wide": torch.full((4,), 1e38), "short": torch.ones(4)}, partial=True)
    model: Any = rank.model
    assert model.wide.tolist() == torch.full((4,), 1e38).tolist()
