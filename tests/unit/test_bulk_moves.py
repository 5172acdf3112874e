"""Planned tensors that come in one row are moved at once, and end where each would alone."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sglang_inflight.scheduler.plans import bulk
from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.plans.replay import Replay
from sglang_inflight.scheduler.update.changes.encoding import PIECE
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.sources.quantizing import Quantized, Quantizer
from sglang_inflight.scheduler.update.sources.stretch import Stretch
from sglang_inflight.vocabulary.errors import Refused
from tests.support.rank import Rank

Tensors = dict[str, torch.Tensor]
STAGED = pytest.mark.parametrize("mode", [StagingMode.DEVICE, StagingMode.CHANGES])
EXPERTS = 10
FORM = Quantized(
    dtype=torch.float8_e4m3fn,
    shape=(4, 4),
    scale="w.scale",
    scale_dtype=torch.float32,
    scale_shape=(1, 1),
    block=(4, 4),
    powers_of_two=False,
    layout="blocks",
)


class Experts(nn.Module):
    """Gates and ups are halves of one weight, scales have another dtype, and a column is held."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = _weight(EXPERTS, 8, 4)
        self.w2 = _weight(EXPERTS, 4, 4)
        self.scales = _weight(EXPERTS, dtype=torch.float32)
        self.held = _weight(5, 2)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            kind, _, number = name.partition(".")
            at = int(number or 0)
            if kind == "gate":
                self.w13.data[at, :4].copy_(tensor)
            elif kind == "up":
                self.w13.data[at, 4:].copy_(tensor)
            elif kind == "down":
                self.w2.data[at].copy_(tensor)
            elif kind == "scale":
                self.scales.data[at].copy_(tensor)
            else:
                self.held.data.copy_(tensor[:, 1:3])


def _weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def checkpoint(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    random = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    tensors: Tensors = {}
    for at in range(EXPERTS):
        # a file has names in order
        tensors |= {f"down.{at}": some(4, 4), f"gate.{at}": some(4, 4), f"up.{at}": some(4, 4)}
        tensors[f"scale.{at}"] = some(1)[0].float()
    return tensors | {"held": some(5, 4)}


@pytest.fixture(autouse=True)
def in_stretches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Rank, "plans", True)
    monkeypatch.setattr(Rank, "stretches", 9)
    with torch.no_grad():
        yield


def served(mode: StagingMode) -> tuple[Experts, Rank]:
    model = Experts()
    model.load_weights(checkpoint(0).items())
    return model, Rank(
        mode, model, checkpoint_shapes={n: t.shape for n, t in checkpoint(0).items()}
    )


def assert_serves(model: nn.Module, tensors: Tensors) -> None:
    expected = Experts()
    expected.load_weights(tensors.items())
    for name, weight in expected.named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], weight), name


@STAGED
@pytest.mark.parametrize("elements", [PIECE, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_in_one_row_end_where_the_loader_puts_them(
    mode: StagingMode, elements: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "PIECE", elements)
    model, rank = served(mode)
    for seed in (1, 2):
        rank.update(checkpoint(seed, dtype))
        assert_serves(model, checkpoint(seed, dtype))
    # one element of each tensor
    new = checkpoint(2)
    for tensor in new.values():
        tensor.view(-1)[-1] += 1
    rank.update(new)
    assert_serves(model, new)


@STAGED
def test_plan_is_not_asked_about_a_tensor_of_a_known_layout(
    mode: StagingMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rank = served(mode)
    rank.update(checkpoint(1))
    for of, method in ((Plan, "is_as_planned"), (Replay, "take"), (Replay, "needs")):
        monkeypatch.setattr(of, method, None)
    rank.update(checkpoint(2))
    assert_serves(model, checkpoint(2))


@STAGED
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("up.4", torch.nan, "'up.4' holds NaN"),
        ("scale.3", torch.inf, "'scale.3' holds NaN or inf"),
        ("gate.2", 3.4e38, "'gate.2' holds a value of magnitude 3.4e.38"),
    ],
)
def test_wrong_value_in_a_row_is_refused_by_its_tensors_name(
    mode: StagingMode, name: str, value: float, why: str
) -> None:
    model, rank = served(mode)
    tensors = checkpoint(1, torch.float32)
    tensors[name].view(-1)[0] = value
    with pytest.raises(Refused, match=why):
        rank.update(tensors)
    assert_serves(model, checkpoint(0))


@STAGED
def test_second_tensor_of_a_name_in_another_row_counts(mode: StagingMode) -> None:
    model, rank = served(mode)
    first, second = checkpoint(1), checkpoint(2)
    update = rank.begin()
    rank.send(update, [first, {name: second[name] for name in ("up.1", "held", "down.5")}])
    rank.commit(update)
    assert_serves(model, first | {name: second[name] for name in ("up.1", "held", "down.5")})


@STAGED
def test_tensor_of_a_row_that_did_not_come_is_missed(mode: StagingMode) -> None:
    model, rank = served(mode)
    tensors = checkpoint(1)
    del tensors["gate.3"]
    with pytest.raises(Refused, match="16 of 320 elements of 'w13'"):
        rank.update(tensors)
    assert_serves(model, checkpoint(0))


@STAGED
def test_name_that_is_no_text_among_others_is_refused(mode: StagingMode) -> None:
    model, rank = served(mode)
    rank.update(checkpoint(1))
    replay, stretch = rank.shadowed._replay, Stretch.begin()
    assert replay is not None
    replay.begin()
    for name in ("gate.1", ["gate.2"], None, "gate.3"):
        stretch.add(name, torch.bfloat16, (4, 4), 32)  # type: ignore[arg-type]
    found = replay.take_bulk(stretch, torch.zeros(stretch.nbytes, dtype=torch.uint8))
    assert found is not None
    assert (sorted(found.names), found.left) == (["gate.1", "gate.3"], [1, 2])
    assert_serves(model, checkpoint(1))


def test_collector_has_nothing_to_do_for_each_tensor_of_a_row() -> None:
    _, rank = served(StagingMode.CHANGES)
    rank.update(checkpoint(1))
    gc.collect()
    (found, *_) = rank._layouts.values()
    (bulk,) = [b for s, b in rank.shadowed._replay._bulks.items() if s is found]  # type: ignore[union-attr]
    reached = {id(bulk): bulk}
    waiting: list[object] = [bulk]
    while waiting:
        for each in gc.get_referents(waiting.pop()):
            is_own = type(each).__module__.endswith((".bulk", ".targets", ".moves"))
            if id(each) not in reached and (is_own or type(each) in (list, dict, tuple)):
                reached[id(each)] = each
                waiting.append(each)
    tracked = Counter(type(each).__name__ for each in reached.values() if gc.is_tracked(each))
    assert tracked["Box"] == 0
    assert tracked["tuple"] < 3, tracked


def test_floats_after_their_stored_form_in_a_row_are_refused() -> None:
    quantizer = Quantizer({"w": FORM})
    quantizer.note_stored(frozenset({"w", "w.scale", "norm"}))
    quantizer.refuse_parts()
    how: dict[str, Any] = {"check_finite": True, "rate_limit": UNPACED, "counts": Counter()}
    with pytest.raises(Refused, match="came as floats"):
        [*quantizer.quantize([("w", torch.ones(4, 4))], **how)]


def test_stored_form_after_its_floats_is_looked_at_alone() -> None:
    quantizer = Quantizer({"w": FORM})
    how: dict[str, Any] = {"check_finite": True, "rate_limit": UNPACED, "counts": Counter()}
    assert quantizer.takes_bulk
    [*quantizer.quantize([("w", torch.ones(4, 4))], **how)]
    assert not quantizer.takes_bulk
