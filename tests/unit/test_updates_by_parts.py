"""An update by the part of each tensor that a rank uses serves what whole tensors would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from sglang_inflight.messages import PartsSource
from sglang_inflight.scheduler.plans.audit import Audit
from sglang_inflight.scheduler.plans.record import Kind
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.sources import reading
from sglang_inflight.scheduler.update.update import Update
from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.regions import Region
from tests.support.rank import Rank

Tensors = dict[str, torch.Tensor]
STAGED = pytest.mark.parametrize("mode", [StagingMode.DEVICE, StagingMode.CHANGES])


class SecondOfTwo(nn.Module):
    """The second rank of two: rows, columns, a fused weight, experts, and one for the loader."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = _weight(4, 6)
        self.columns = _weight(8, 3)
        self.fused = _weight(6, 4)
        self.expert = _weight(4, 4)
        self.norm = _weight(8)
        self.scaled = _weight(4)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "rows":
                self.rows.data.copy_(tensor[4:])
            elif name == "columns":
                self.columns.data.copy_(tensor[:, 3:])
            elif name in ("q", "k", "v"):
                at = "qkv".index(name) * 2
                self.fused.data[at : at + 2].copy_(tensor[2:])
            elif name == "expert.1":
                self.expert.data.copy_(tensor.t())
            elif name == "norm":
                self.norm.data.copy_(tensor)
            elif name == "scaled":
                self.scaled.data.copy_(tensor[4:] * 2)


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)


SHAPES = {
    "rows": (8, 6),
    "columns": (8, 6),
    "q": (4, 4),
    "k": (4, 4),
    "v": (4, 4),
    "expert.0": (4, 4),
    "expert.1": (4, 4),
    "norm": (8,),
    "scaled": (8,),
}
PARTS = {
    "rows": Region((4, 0), (4, 6)),
    "columns": Region((0, 3), (8, 3)),
    **dict.fromkeys("qkv", Region((2, 0), (2, 4))),
    "expert.1": Region.whole((4, 4)),
    "norm": Region.whole((8,)),
    "scaled": Region.whole((8,)),
}


def checkpoint(seed: int) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=random).bfloat16() for n, s in SHAPES.items()}


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Rank, "plans", True)
    with torch.no_grad():
        yield


class Wire:
    """Brings parts of given tensors, and notes what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors: Tensors = {}
        self.sent: list[torch.Tensor] = []
        self.parts: Mapping[str, Region] = {}
        self.change: Any = lambda name, part: part
        monkeypatch.setattr(reading, "WIRES", [lambda _: ("test", self._read)])

    def _read(self, _: object, __: object, parts: Mapping[str, Region], *___: object) -> Any:
        self.parts = parts
        for name, tensor in self.tensors.items():
            if name in parts:
                part = tensor[parts[name].slices()].contiguous()
                part = self.change(name, part)
                self.sent.append(part)
                yield name, part


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


def served(mode: StagingMode) -> Rank:
    model = SecondOfTwo()
    model.load_weights(checkpoint(0).items())
    rank = Rank(mode, model, checkpoint_shapes=SHAPES)
    kinds = {name: Kind(shape, torch.bfloat16) for name, shape in SHAPES.items()}
    rank.shadowed.findings._kinds = kinds
    return rank


def send(rank: Rank, wire: Wire, tensors: Tensors, *, partial: bool = False) -> Update:
    update = rank.begin(partial=partial)
    rank.prepare(update)
    wire.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    rank.fill_from(update, PartsSource(wire="test", body=b"", group_name=""))
    # the wire's memory is its own again
    for part in wire.sent:
        part.fill_(-1)
    rank.seal(update)
    return update


def assert_serves(rank: Rank, tensors: Tensors) -> None:
    expected = SecondOfTwo()
    expected.load_weights(tensors.items())
    for name, weight in expected.named_parameters():
        assert torch.equal(dict(rank.model.named_parameters())[name], weight), name


@STAGED
def test_parts_serve_what_whole_tensors_would(mode: StagingMode, wire: Wire) -> None:
    rank = served(mode)
    for seed in (1, 2):
        rank.commit(send(rank, wire, checkpoint(seed)))
        assert_serves(rank, checkpoint(seed))
    assert wire.parts == PARTS
    # whole tensors afterwards, and parts after those
    rank.update(checkpoint(3))
    assert_serves(rank, checkpoint(3))
    rank.commit(send(rank, wire, checkpoint(4)))
    assert_serves(rank, checkpoint(4))


@STAGED
def test_some_tensors_by_parts_leave_the_others(mode: StagingMode, wire: Wire) -> None:
    rank = served(mode)
    few = {name: checkpoint(1)[name] for name in ("columns", "k", "expert.0")}
    rank.commit(send(rank, wire, few, partial=True))
    assert_serves(rank, checkpoint(0) | few)


@STAGED
def test_part_that_does_not_come_is_missed(mode: StagingMode, wire: Wire) -> None:
    rank = served(mode)
    tensors = checkpoint(1)
    del tensors["k"]
    with pytest.raises(Refused, match="8 of 24 elements of 'fused'"):
        send(rank, wire, tensors)
    assert_serves(rank, checkpoint(0))


@STAGED
@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("q", lambda part: part[:1].clone(), r"part of 'q' has the shape \[1, 4\], and .*\[2, 4\]"),
        ("q", lambda part: part.int(), r"'q' is torch.int32, and torch.bfloat16 in the served"),
        ("norm", lambda part: part * torch.nan, "'norm' holds NaN"),
        ("rows", lambda part: part * torch.inf, "'rows' holds NaN or inf"),
    ],
    ids=["shape", "dtype", "NaN", "infinity"],
)
def test_wrong_part_is_refused_by_its_tensors_name(
    mode: StagingMode, wire: Wire, name: str, change: Any, why: str
) -> None:
    rank = served(mode)
    wire.change = lambda of, part: change(part) if of == name else part
    with pytest.raises(Refused, match=why):
        send(rank, wire, checkpoint(1))
    assert_serves(rank, checkpoint(0))


@STAGED
def test_every_planned_part_is_audited_in_time(mode: StagingMode, wire: Wire) -> None:
    rank = served(mode)
    audited = 0

    def count(right: int, wrong: int) -> None:
        nonlocal audited
        audited += right
        assert not wrong

    rank.shadowed.on_audit = count
    for seed in range(1, 4):
        rank.commit(send(rank, wire, checkpoint(seed)))
    assert audited >= 3


@STAGED
def test_part_that_the_loader_puts_elsewhere_is_refused(
    mode: StagingMode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = served(mode)
    # the plan looks at other columns than the loader
    monkeypatch.setattr(Audit, "wants", lambda self, name: name == "columns")
    monkeypatch.setattr(Audit, "begin", lambda self: self._wanted.update(columns=("columns",)))
    plan = rank.shadowed.findings.plan
    assert plan is not None
    (planned,) = plan.moves["columns"]
    move = planned.move._replace(of=planned.move.of - 1)
    plan.moves["columns"] = (type(planned)(planned.place, move),)
    with pytest.raises(Refused, match="loader does not put 'columns' into 'columns'"):
        send(rank, wire, checkpoint(1))
    assert_serves(rank, checkpoint(0))


@STAGED
def test_rank_that_knows_no_checkpoint_says_so(mode: StagingMode, wire: Wire) -> None:
    rank = served(mode)
    rank.shadowed.findings._kinds = {}
    with pytest.raises(Refused, match="nothing says which part of its tensors this rank uses"):
        send(rank, wire, checkpoint(1))


@STAGED
def test_rank_without_a_plan_takes_whole_tensors(mode: StagingMode, wire: Wire) -> None:
    rank = served(mode)
    rank.shadowed.findings.plan = None
    rank.shadowed.findings._is_unplannable = True
    rank.commit(send(rank, wire, checkpoint(1)))
    assert wire.parts == {name: Region.whole(shape) for name, shape in SHAPES.items()}
    assert_serves(rank, checkpoint(1))


def test_unknown_wire_is_refused(wire: Wire) -> None:
    rank = served(StagingMode.DEVICE)
    update = rank.begin()
    rank.prepare(update)
    with pytest.raises(Refused, match="parts of tensors come by 'pigeon', which is not known"):
        rank.fill_from(update, PartsSource(wire="pigeon", body=b"", group_name=""))
