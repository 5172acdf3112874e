"""Updates whose tensors go by a load plan, beside fresh loads of the same checkpoint."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from sglang_inflight.messages import AskedDigests, DiskSource
from sglang_inflight.scheduler.plans import audit, remembered, replay
from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.plans.record import Kind, kinds_of, record
from sglang_inflight.scheduler.plans.remembered import recall, remember
from sglang_inflight.scheduler.update.digested_form import DigestedForm
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.shadow import weights_of
from sglang_inflight.scheduler.update.sources import reading
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.checkpoint_files import read_safetensors
from sglang_inflight.scheduler.update.sources.safetensors_file import Indexes, Wanted
from sglang_inflight.scheduler.update.sources.stretch import Stretch, Take
from sglang_inflight.scheduler.update.weight import Weight
from sglang_inflight.vocabulary.errors import Refused
from tests.support.rank import Rank
from tests.unit.test_load_plans import NAMES, SHAPE, Random, checkpoint
from tests.unit.test_load_plans import Model as Three

Tensors = dict[str, torch.Tensor]
Weights = Iterable[tuple[str, torch.Tensor]]

STAGED = pytest.mark.parametrize("mode", [StagingMode.DEVICE, StagingMode.CHANGES])
DTYPE = torch.bfloat16


@pytest.fixture(
    autouse=True,
    params=[(1 << 20, 0), (30, 0), (1 << 20, 2), (1 << 20, 99)],
    ids=["one batch", "small batches", "short stretches", "one stretch"],
)
def no_grad(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turn gradients off, like the staging thread, and let each rank have a plan."""
    most, stretches = request.param
    monkeypatch.setattr(Rank, "plans", True)
    monkeypatch.setattr(Rank, "stretches", stretches)
    monkeypatch.setattr(replay, "_MOST_ELEMENTS", most)
    with torch.no_grad():
        yield


class Fused(nn.Module):
    """Two halves in one weight, padding behind a table, experts, and a weight that is computed.

    ``calls`` counts calls of the loaders of the model and of all copies of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[str]] = []
        self.gate_up = _parameter(8, 6)
        self.table = _parameter(10, 4)
        self.experts = _parameter(4, 3, 2)
        self.decay = _parameter(5)

    def load_weights(self, weights: Weights) -> None:
        parameters = dict(self.named_parameters())
        self.calls.append(got := [])
        for name, tensor in weights:
            got.append(name)
            kind, _, number = name.partition(".")
            if kind == "gate":
                parameters["gate_up"].data[:4].copy_(tensor)
            elif kind == "up":
                parameters["gate_up"].data[4:].copy_(tensor)
            elif kind == "table":
                parameters["table"].data[:7].copy_(tensor)
                parameters["table"].data[7:].fill_(0)
            elif kind == "expert":
                parameters["experts"].data[int(number)].copy_(tensor.t())
            elif kind == "decay":
                parameters["decay"].data.copy_(-torch.exp(tensor.float()))
            else:
                default_weight_loader(parameters[kind], tensor)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=DTYPE), requires_grad=False)


SHAPES: dict[str, tuple[int, ...]] = {
    "gate": (4, 6),
    "up": (4, 6),
    "table": (7, 4),
    **{f"expert.{at}": (2, 3) for at in range(4)},
    "decay": (5,),
}


def tensors(seed: int) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random).to(DTYPE) for name, shape in SHAPES.items()}


def fresh(weights: Tensors) -> Fused:
    model = Fused()
    model.load_weights(weights.items())
    return model


def rank_of(mode: StagingMode, model: nn.Module) -> Rank:
    return Rank(mode, model, checkpoint_shapes=SHAPES)


def assert_serves(model: nn.Module, expected: nn.Module) -> None:
    served = dict(model.named_parameters())
    for name, weight in expected.named_parameters():
        assert torch.equal(served[name], weight), name


@STAGED
def test_loader_gets_what_computes_and_nothing_else(
    mode: StagingMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    # audits give it the others
    monkeypatch.setattr(audit, "_MOST_TENSORS", 0)
    model = fresh(tensors(0))
    rank = rank_of(mode, model)
    model.calls.clear()
    rank.update(tensors(1))
    assert model.calls == [["decay"]]
    rank.update({n: t for n, t in tensors(2).items() if n != "decay"}, partial=True)
    assert model.calls == [["decay"]]
    assert_serves(model, fresh(tensors(2) | {"decay": tensors(1)["decay"]}))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[bool, list[list[str]]]]:
    """Draw updates: whether each is partial, and the names in each of its calls."""
    history = []
    for _ in range(draw(st.integers(1, 4))):
        partial = draw(st.booleans())
        chosen = st.lists(st.sampled_from([*SHAPES]), min_size=1, max_size=12)
        names = draw(chosen) if partial else draw(st.permutations([*SHAPES]))
        ends = sorted(draw(st.sets(st.integers(1, len(names)), max_size=3)) | {len(names)})
        history.append(
            (partial, [names[begin:end] for begin, end in zip([0, *ends], ends, strict=False)])
        )
    return history


@STAGED
@settings(max_examples=80, deadline=None)
@given(history=histories(), drops=st.booleans())
def test_any_history_of_updates_gives_what_fresh_loads_give(
    mode: StagingMode, history: list[tuple[bool, list[list[str]]]], drops: bool
) -> None:
    """A tensor may come twice in an update, and an update may be dropped in its midst."""
    served = tensors(0)
    model = fresh(served)
    rank = rank_of(mode, model)
    for version, (partial, calls) in enumerate(history, 1):
        before = dict(served)
        pieces = []
        for at, names in enumerate(calls):
            new = tensors(100 * version + at)
            pieces.append({name: new[name] for name in names})
            served |= pieces[-1]
        if drops:
            lacking = [{n: t for n, t in piece.items() if n != "table"} for piece in pieces]
            if any(lacking) and not partial:
                with pytest.raises(Refused, match="not complete"):
                    rank.update(*lacking)
                assert_serves(model, fresh(before))
        rank.update(*pieces, partial=partial)
        assert_serves(model, fresh(served))
        rank.roll_back()
        assert_serves(model, fresh(before))
        rank.roll_back()


@STAGED
@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.sampled_from(NAMES),
            st.sampled_from(NAMES),
            st.integers(0, 8),
            st.integers(0, 5),
        ),
        max_size=4,
    ),
    order=st.permutations(NAMES),
)
def test_random_loader_is_planned_right_or_refused(
    mode: StagingMode, steps: list[Any], order: list[str]
) -> None:
    model, expected = Random(steps), Random(steps)
    model.load_weights(checkpoint(0).items())
    expected.load_weights(checkpoint(1).items())
    rank = Rank(mode, model, checkpoint_shapes=dict.fromkeys(NAMES, SHAPE))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    new = checkpoint(1)
    try:
        rank.update({name: new[name] for name in order})
    except Refused:
        # its loader needs all tensors at once, also those that are planned
        now = dict(model.named_parameters())
        assert all(torch.equal(now[name], weight) for name, weight in before.items())
    else:
        assert_serves(model, expected)


@STAGED
@pytest.mark.parametrize("sent", [(), ("gate",), ("gate", "up")], ids=str)
def test_fused_weight_comes_whole_after_some_of_its_halves(
    mode: StagingMode, sent: tuple[str, ...]
) -> None:
    """The loader writes a planned weight, from a tensor that is in no plan."""
    model = fresh(tensors(0))
    rank = rank_of(mode, model)
    new = tensors(1)
    rest = {n: t for n, t in new.items() if n not in ("gate", "up")}
    halves = {name: tensors(2)[name] for name in sent}
    whole = torch.cat([new["gate"], new["up"]])
    rank.update(rest, halves, {"gate_up": whole})
    assert_serves(model, fresh(new))


@STAGED
def test_half_by_the_loader_after_a_half_by_the_plan_is_whole(mode: StagingMode) -> None:
    """A half of another dtype goes by the loader; the other half's elements count as sent."""

    class Halves(Fused):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights((name.removeprefix("other."), tensor) for name, tensor in weights)

    model = Halves()
    model.load_weights(tensors(0).items())
    rank = rank_of(mode, model)
    new = tensors(1)
    up = new.pop("up")
    rank.update(new, {"other.up": up})
    assert_serves(model, fresh(new | {"up": up}))
    with pytest.raises(Refused, match=r"24 of 48 elements of 'gate_up' were not sent"):
        rank.update({n: t for n, t in new.items() if n != "gate"}, {"other.up": up})


@STAGED
def test_missing_tensors_of_a_plan_are_named_with_their_elements(mode: StagingMode) -> None:
    model = fresh(tensors(0))
    rank = rank_of(mode, model)
    some = {n: t for n, t in tensors(1).items() if n not in ("up", "expert.2")}
    with pytest.raises(Refused, match=r"24 of 48 elements of 'gate_up' .* not sent: expert.2, up"):
        rank.update(some)
    assert_serves(model, fresh(tensors(0)))


@STAGED
def test_loader_that_reads_planned_weights_reads_what_was_sent(mode: StagingMode) -> None:
    class Reads(Fused):
        def load_weights(self, weights: Weights) -> None:
            for name, tensor in weights:
                if name == "doubles":
                    self.decay.data.copy_(self.gate_up.data[0, :5] * 2)
                else:
                    super().load_weights([(name, tensor)])

    model = Reads()
    model.load_weights(tensors(0).items())
    rank = rank_of(mode, model)
    gate = {"gate": tensors(1)["gate"]}
    rank.update(gate, {"doubles": torch.zeros(1, dtype=DTYPE)}, partial=True)
    expected = fresh(tensors(0) | gate)
    expected.decay.data.copy_(gate["gate"][0, :5] * 2)
    assert_serves(model, expected)


# ---- digests ---------------------------------------------------------------------------


@STAGED
def test_whole_weight_is_read_before_the_next_tensor_comes(
    mode: StagingMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seal reads what is left: here the weight that goes by the loader."""
    reads: list[str] = []
    read = DigestedForm._read

    def note(form: DigestedForm, name: str, weight: Weight, check: Callable[[], None]) -> str:
        reads.append(weight.name)
        return read(form, name, weight, check)

    monkeypatch.setattr(DigestedForm, "_read", note)
    rank = rank_of(mode, fresh(tensors(0)))
    update, new = rank.begin(), tensors(1)
    rank.prepare(update)
    rank.fill(update, {"gate": new["gate"]})
    assert reads == []
    rank.fill(update, {"up": new["up"]})
    assert reads == ["gate_up"]
    rest = {name: tensor for name, tensor in new.items() if name not in ("gate", "up")}
    rank.fill(update, rest)
    assert sorted(reads) == ["experts", "gate_up", "table"]
    # a weight that comes once more is read once more
    rank.fill(update, {"gate": new["gate"]})
    rank.seal(update)
    assert sorted(reads[3:]) == ["decay", "gate_up"]
    rank.commit(update)


# ---- sparse tensors ---------------------------------------------------------------------


class Shards(nn.Module):
    """Takes columns, every second row, and parts of a tensor's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.columns, self.odd = _parameter(6, 2), _parameter(3, 5)
        self.parts, self.broadcast = _parameter(2, 12), _parameter(4, 3)

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "columns":
                self.columns.data.copy_(tensor[:, 2:4])
            elif name == "odd":
                self.odd.data.copy_(tensor[1::2])
            elif name == "parts":
                self.parts.data[1].copy_(tensor.t().reshape(-1))
                self.parts.data[0].copy_(tensor.reshape(-1))
            else:
                self.broadcast.data.copy_(tensor)


_OF_SHARDS = {"columns": (6, 5), "odd": (6, 5), "parts": (3, 4), "broadcast": (3,)}


@STAGED
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_sparse_elements_go_where_their_whole_tensor_would(
    mode: StagingMode, seed: int, share: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    served = {n: torch.randn(s, generator=random).to(DTYPE) for n, s in _OF_SHARDS.items()}
    model, expected = Shards(), Shards()
    model.load_weights(served.items())
    rank = Rank(mode, model, checkpoint_shapes=_OF_SHARDS)
    sent: Tensors = {}
    for name, tensor in served.items():
        numel = tensor.numel()
        at = torch.randperm(numel, generator=random)[: int(share * numel)]
        # in one rank's memory, and cast on the way
        values = torch.randn(len(at), generator=random)
        tensor.view(-1)[at] = values.to(DTYPE)
        sent |= {f"{name}.indices": at, f"{name}.values": values}
    rank.update(sent, partial=True, load_format="sparse")
    expected.load_weights(served.items())
    assert_serves(model, expected)


def test_parts_of_tensors_are_written_in_place() -> None:
    model = fresh(tensors(0))
    rank = rank_of(StagingMode.OFF, model)
    kinds = {n: Kind(tuple(t.shape), t.dtype) for n, t in tensors(0).items()}
    rank.shadowed.findings.plan = Plan.of(record(model, kinds), kinds, dict(weights_of(model)))
    at = torch.tensor([3, 1])
    new = torch.tensor([1.0, 5.0], dtype=DTYPE)
    with pytest.raises(Refused, match="send whole tensors decay"):
        rank.update({"decay.indices": at, "decay.values": new}, partial=True, load_format="sparse")
    assert rank.writes == 0
    rank.update({"gate.indices": at, "gate.values": new}, partial=True, load_format="sparse")
    assert rank.writes
    expected = tensors(0)
    expected["gate"].view(-1)[at] = new
    assert_serves(model, fresh(expected))


@STAGED
def test_sparse_tensor_in_two_calls_ends_as_the_second(mode: StagingMode) -> None:
    model = fresh(tensors(0))
    rank = rank_of(mode, model)
    at = torch.tensor([3, 1])
    calls = [
        {"gate.indices": at, "gate.values": torch.tensor([value, 5.0], dtype=DTYPE)}
        for value in (1.0, 2.0)
    ]
    rank.update(*calls, partial=True, load_format="sparse")
    expected = tensors(0)
    expected["gate"].view(-1)[at] = torch.tensor([2.0, 5.0], dtype=DTYPE)
    assert_serves(model, fresh(expected))


@STAGED
def test_sparse_value_that_a_weight_cannot_hold_is_refused(mode: StagingMode) -> None:
    model = fresh(tensors(0))
    rank = rank_of(mode, model)
    sent = {"gate.indices": torch.tensor([0]), "gate.values": torch.tensor([3.4e38])}
    with pytest.raises(Refused, match=r"3.4e\+38, and parameter 'gate_up' is torch.bfloat16"):
        rank.update(sent, partial=True, load_format="sparse")
    assert_serves(model, fresh(tensors(0)))


# ---- audits ----------------------------------------------------------------------------


class Changes(Three):
    """Its loader does something else from some day on."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor.flip(0) if CHANGED and name == "b" else tensor)


CHANGED: list[bool] = []


@STAGED
def test_audit_refuses_an_update_whose_loader_does_something_else(mode: StagingMode) -> None:
    CHANGED.clear()
    model = Changes()
    model.load_weights(checkpoint(0).items())
    rank = Rank(mode, model, checkpoint_shapes=dict.fromkeys(NAMES, SHAPE))
    found: list[tuple[int, int]] = []
    rank.shadowed.on_audit = lambda *counts: found.append(counts)
    rank.update(checkpoint(1))
    assert found == [(3, 0)]
    CHANGED.append(True)
    with pytest.raises(Refused, match="does not put 'b' into 'b'"):
        rank.update(checkpoint(2))
    assert found[1:] == [(0, 1)]
    assert_serves(model, loaded_before(checkpoint(1)))
    # the loader is right by definition
    rank.update(checkpoint(2))
    expected = Changes()
    expected.load_weights(checkpoint(2).items())
    assert_serves(model, expected)


def loaded_before(weights: Tensors) -> Three:
    model = Three()
    model.load_weights(weights.items())
    return model


def test_audit_takes_other_tensors_each_time() -> None:
    model = fresh(tensors(0))
    rank = rank_of(StagingMode.DEVICE, model)
    model.calls.clear()
    audited = set()
    for version in range(1, 4):
        rank.update(tensors(version))
        audited |= {name for call in model.calls for name in call}
        model.calls.clear()
    assert audited == SHAPES.keys()


class Communicates(Three):
    """Its loader asks other ranks, which may be in a step, or not ask at all."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if COMMUNICATES and (name == "b" or not tensor.is_meta):
            torch.ops._c10d_functional.all_reduce(tensor, "sum", "nobody")
        super().load(name, tensor)


COMMUNICATES: list[bool] = []


def test_loader_that_communicates_has_no_plan_for_what_it_communicates_about() -> None:
    COMMUNICATES[:] = [True]
    rank = Rank(StagingMode.DEVICE, Communicates(), checkpoint_shapes=dict.fromkeys(NAMES, SHAPE))
    COMMUNICATES.clear()
    plan = rank.shadowed.findings.plan
    assert plan is not None
    assert plan.moves.keys() == {"a", "c"}
    assert "communicates between ranks" in plan.by_loader["b"]


def test_audit_ends_where_the_loader_communicates(caplog: pytest.LogCaptureFixture) -> None:
    COMMUNICATES.clear()
    model = Communicates()
    model.load_weights(checkpoint(0).items())
    rank = Rank(StagingMode.DEVICE, model, checkpoint_shapes=dict.fromkeys(NAMES, SHAPE))
    COMMUNICATES.append(True)
    rank.update(checkpoint(1))
    COMMUNICATES.clear()
    assert "are not audited" in caplog.text
    assert_serves(model, loaded_before(checkpoint(1)))


# ---- remembered ------------------------------------------------------------------------


def test_recalled_plan_is_the_one_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("SGLANG_INFLIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(remembered, "_AT_ONCE", 3)
    plan = rank_of(StagingMode.DEVICE, fresh(tensors(0))).shadowed.findings.plan
    assert plan is not None
    plan.numbers = {"experts.use_padded_loading": True, "experts.count": 3, "scale": 0.5}
    remember("one", plan)
    found = recall("one")
    assert found is not None
    assert vars(found) == vars(plan)
    assert recall("another") is None


class Layers(nn.Module):
    """Layers of experts that are all alike."""

    def __init__(self) -> None:
        super().__init__()
        for layer in range(LAYERS):
            self.register_parameter(f"layer{layer}", _parameter(4, 3, 2))

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            layer, _, expert = name.partition(".")
            getattr(self, layer).data[int(expert)].copy_(tensor)


LAYERS = 50


@pytest.mark.parametrize("recalled", [False, True])
def test_collector_has_nothing_to_do_for_each_tensor_of_a_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, *, recalled: bool
) -> None:
    """A full collection holds the interpreter, and a model may have 140,000 tensors."""
    monkeypatch.setenv("SGLANG_INFLIGHT_CACHE", str(tmp_path))
    model = Layers()
    names = [f"layer{layer}.{expert}" for layer in range(LAYERS) for expert in range(4)]
    kinds = kinds_of(dict.fromkeys(names, ((3, 2), DTYPE)))
    plan: Plan | None = Plan.of(record(model, kinds), kinds, dict(model.named_parameters()))
    if recalled:
        assert plan is not None
        remember("one", plan)
        plan = recall("one")
    assert plan is not None
    assert plan.needed == set(names)
    # a tuple is left out once a collection has seen that it holds nothing to collect
    gc.collect()
    planned = [each for moves in plan.moves.values() for each in moves]
    assert not any(map(gc.is_tracked, (*plan.moves.values(), *planned)))
    assert len({id(each.move) for each in planned}) == 4
    assert len({id(kind) for kind in plan.kinds.values()}) == 1


def test_file_that_is_no_plan_is_found_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_INFLIGHT_CACHE", str(tmp_path))
    plan = rank_of(StagingMode.DEVICE, fresh(tensors(0))).shadowed.findings.plan
    assert plan is not None
    remember("one", plan)
    (file,) = (tmp_path / "plans").iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    assert recall("one") is None
    assert "is not one" in caplog.text


def test_recalled_moves_that_reach_beyond_a_weight_are_not_made() -> None:
    plan = rank_of(StagingMode.DEVICE, fresh(tensors(0))).shadowed.findings.plan
    assert plan is not None
    smaller = Fused()
    smaller.gate_up = _parameter(7, 6)
    plan.fit(dict(smaller.named_parameters()))
    assert plan.by_loader.keys() == {"gate", "up", "decay"}


# ---- checkpoints on disk ---------------------------------------------------------------


class FirstStage(Three):
    """Takes no tensor of the second stage."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if not name.startswith("second."):
            super().load(name, tensor)


class OnDisk:
    """The first stage of a model, updated from folders. ``read`` has the names that it read."""

    def __init__(
        self,
        mode: StagingMode,
        monkeypatch: pytest.MonkeyPatch,
        folder: Path,
        ties: Tensors | None = None,
    ) -> None:
        self.model, self.folder = FirstStage(), folder
        self.read = set[str]()
        self.model.load_weights(both_stages(0).items())
        shapes = {name: t.shape for name, t in {**both_stages(0), **(ties or {})}.items()}
        ties_head = ties is not None
        self.rank = Rank(mode, self.model, checkpoint_shapes=shapes, ties_head=ties_head)
        monkeypatch.setattr(reading, "read_disk", self._read)

    def update(self, tensors: Tensors, digests: AskedDigests | None = None) -> None:
        save_file(tensors, self.folder / "model.safetensors")
        update = self.rank.begin()
        self.rank.prepare(update)
        source = DiskSource(model_path=str(self.folder))
        self.rank._jobs.fill(update, source, None, digests)
        assert (update.tensors, update.names["target"]) == (len(tensors), set(tensors))
        self.rank.seal(update)
        self.rank.commit(update)

    def _read(
        self,
        source: DiskSource,
        runner: Any,
        *,
        wants: Wanted,
        take: Take,
        indexes: Indexes,
        **how: Any,
    ) -> Iterator[Any]:
        def noting(stretch: Stretch, row: torch.Tensor | None) -> Sequence[int]:
            if row is not None:
                self.read |= {*stretch.names}
            return take(stretch, row)

        path = f"{source.model_path}/model.safetensors"
        with AbandonableThread(lambda: None) as thread:
            yield from read_safetensors(
                [path], thread, UNPACED, wants=wants, take=noting, indexes=indexes
            )


def both_stages(seed: int) -> Tensors:
    return checkpoint(seed) | {f"second.{n}": t for n, t in checkpoint(seed + 100).items()}


@STAGED
def test_tensors_of_another_rank_are_not_read_from_disk(
    mode: StagingMode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served = OnDisk(mode, monkeypatch, tmp_path)
    for seed in (1, 2):
        sent = both_stages(seed)
        # the second stage's own matter
        sent["second.b"].fill_(torch.nan)
        served.read.clear()
        served.update(sent)
        assert served.read == set(NAMES)
        for name in NAMES:
            assert torch.equal(getattr(served.model, name), sent[name])


@STAGED
@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"second.b": torch.zeros(SHAPE[::-1], dtype=DTYPE)}, r"second\.b' has shape"),
        ({"stranger": torch.zeros(SHAPE, dtype=DTYPE)}, r"stranger"),
        ({"b": torch.full(SHAPE, torch.inf, dtype=DTYPE)}, r"'b' holds NaN or infinity"),
    ],
)
def test_wrong_tensor_of_any_rank_on_disk_is_refused(
    mode: StagingMode,
    changed: Tensors,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    served = OnDisk(mode, monkeypatch, tmp_path)
    with pytest.raises(Refused, match=why):
        served.update(both_stages(1) | changed)
    assert torch.equal(served.model.a, checkpoint(0)["a"])


@STAGED
def test_checkpoint_on_disk_without_a_tensor_is_refused(
    mode: StagingMode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served = OnDisk(mode, monkeypatch, tmp_path)
    sent = both_stages(1)
    del sent["b"]
    with pytest.raises(Refused, match="not sent: b"):
        served.update(sent)


@STAGED
def test_digest_of_a_checkpoint_on_disk_is_of_every_byte(
    mode: StagingMode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served = OnDisk(mode, monkeypatch, tmp_path)
    served.update(both_stages(1), AskedDigests())
    assert served.read == both_stages(1).keys()


@STAGED
def test_tied_head_on_disk_is_compared_where_no_weight_needs_it(
    mode: StagingMode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tied = {"second.lm_head.weight": torch.ones(SHAPE), "second.embed_tokens.weight": torch.ones(3)}
    served = OnDisk(mode, monkeypatch, tmp_path, ties=tied)
    with pytest.raises(Refused, match="differs from the embeddings"):
        served.update(both_stages(1) | tied)
    assert {*tied} <= served.read
