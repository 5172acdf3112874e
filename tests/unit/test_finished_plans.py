"""Weights that finishing leaves alone go by a load plan, and their modules are not finished."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8Config, W8A8Fp8LinearMethod
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from sglang_inflight.scheduler.plans import audit
from sglang_inflight.scheduler.plans.plan import Plan, are_equal
from sglang_inflight.scheduler.plans.record import Kind, record
from sglang_inflight.scheduler.plans.remembered import remember
from sglang_inflight.scheduler.update.digested_form import DigestedForm
from sglang_inflight.scheduler.update.finished.places import tensors_of
from sglang_inflight.scheduler.update.finished.plannable import leave_torn, plannable
from sglang_inflight.scheduler.update.finished.proof import find_recipe
from sglang_inflight.scheduler.update.finished.recipe import Recipe
from sglang_inflight.scheduler.update.forms import WholeCopies
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.swap import swap_for
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import Refused
from tests.support.rank import CPU, Rank, Tensors
from tests.unit.finishing import Finish, Finishing

MODES = pytest.mark.parametrize(
    "mode", [StagingMode.DEVICE, StagingMode.CHANGES], ids=lambda mode: mode.name.lower()
)
KEPT = {"norm.weight", "fused.weight", "fused.bias"}


# names that loaders were given, of the open update and those before it
asked: list[str] = []


def leaves_alone(layer: Any) -> None:
    """Give the parameter another object for the same memory, as FP8's do."""
    layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)


def quantize(layer: Any) -> None:
    layer.scale = layer.weight.data.abs().amax(dim=1)
    layer.weight = nn.Parameter((layer.weight.data / layer.scale[:, None]).t().contiguous(), False)


class Layer(nn.Module):
    def __init__(self, finish: Finish | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3), requires_grad=False)
        if finish is not None:
            self.quant_method = Finishing(finish)


class Model(nn.Module):
    """``norm`` has no method, ``fused`` has one, and ``packed`` is quantized."""

    def __init__(self, finish: Finish = leaves_alone) -> None:
        super().__init__()
        self.norm, self.fused, self.packed = Layer(None), Layer(finish), Layer(quantize)
        self.fused.bias = nn.Parameter(torch.empty(4), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters: dict[str, Any] = dict(self.named_parameters())
        for name, tensor in weights:
            asked.append(name)
            if name in ("fused.upper", "fused.lower"):
                half = slice(0, 2) if name == "fused.upper" else slice(2, 4)
                parameters["fused.weight"].data[half].copy_(tensor)
            else:
                renamed = name.replace("again", "weight")
                default_weight_loader(parameters[renamed], tensor)


def checkpoint(version: int) -> Tensors:
    generator = torch.Generator().manual_seed(version)
    shapes = {
        "norm.weight": (4, 3),
        "fused.upper": (2, 3),
        "fused.lower": (2, 3),
        "fused.bias": (4,),
        "packed.weight": (4, 3),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


KINDS = {name: Kind(tuple(t.shape), t.dtype) for name, t in checkpoint(0).items()}


def some(version: int, *names: str) -> Tensors:
    return {name: checkpoint(version)[name] for name in names}


def serve(model: Any, tensors: Tensors) -> Any:
    """Load and finish ``model`` as SGLang does."""
    model.load_weights(tensors.items())
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()
    for layer in model.modules():
        if hasattr(layer, "quant_method"):
            layer.quant_method.process_weights_after_loading(layer)
    return model


def found(pristine: nn.Module, live: nn.Module, tensors: Tensors) -> Recipe:
    loaded = {memory_key(tensor) for tensor in tensors_of(live).values()}
    return find_recipe(pristine, live, CPU, tensors.items(), UNPACED, 1 << 30, loaded)


class Served:
    """A rank that serves version 0 of a model that is finished after loading."""

    def __init__(
        self, mode: StagingMode, kind: Any = Model, start: Tensors | None = None, **how: Any
    ) -> None:
        """``start``: what is served in place of version 0."""
        self.start = tensors = start or checkpoint(0)
        self.kind, self.how = kind, how
        self.live = serve(kind(**how), tensors)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.rank = Rank(mode, self.live, checkpoint_shapes=shapes)
        if (plan := self.rank.shadowed.findings.plan) is not None:
            plan.kinds = {n: Kind(tuple(t.shape), t.dtype) for n, t in tensors.items()}
        self.rank.finish_after_loading(kind(**how), found(kind(**how), self.live, tensors))
        asked.clear()

    @property
    def planned(self) -> set[str]:
        plan = self.rank.shadowed.findings.plan
        assert plan is not None
        return {*plan.writers}

    def serves(self, *sent: Tensors) -> bool:
        """Whether a fresh load of the start, and then of what was sent, serves the same bytes."""
        tensors = dict(self.start)
        for one in sent:
            tensors |= one
        expected = tensors_of(serve(self.kind(**self.how), tensors))
        served = tensors_of(self.live)
        return served.keys() == expected.keys() and all(
            served[at].stride() == expected[at].stride()
            and are_equal(served[at], expected[at], UNPACED)
            for at in served
        )


@pytest.fixture(autouse=True)
def by_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rank, "plans", True)


@pytest.fixture
def unaudited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no update audit its plan, which asks the loader, too."""
    monkeypatch.setattr(audit, "_MOST_TENSORS", 0)


# ---- updates ---------------------------------------------------------------------------


def update_twice(served: Served) -> None:
    """Update to the versions 1 and 2. The loader is asked for the packed weight alone."""
    for version in (1, 2):
        served.rank.update(checkpoint(version))
        assert asked == ["packed.weight"]
        assert served.serves(checkpoint(version))
        asked.clear()


@MODES
@pytest.mark.usefixtures("unaudited")
def test_whole_update_asks_the_loader_for_what_is_finished_alone(mode: StagingMode) -> None:
    served = Served(mode)
    assert served.planned == KEPT
    update_twice(served)
    served.rank.roll_back()
    assert served.serves(checkpoint(1))


@MODES
@pytest.mark.parametrize(
    "names",
    [
        ["norm.weight"],
        ["fused.lower"],
        ["fused.bias"],
        ["packed.weight"],
        ["fused.upper", "packed.weight"],
    ],
)
def test_partial_update_leaves_the_rest_as_it_is_served(
    mode: StagingMode, names: list[str]
) -> None:
    served = Served(mode)
    for version in (1, 2):
        served.rank.update(some(version, *names), partial=True)
        assert served.serves(some(version, *names))


@MODES
def test_update_in_several_calls_brings_the_same(mode: StagingMode) -> None:
    served = Served(mode)
    served.rank.update(*({name: tensor} for name, tensor in checkpoint(1).items()))
    assert served.serves(checkpoint(1))


def test_planned_weight_without_a_tensor_is_no_part_of_the_commit() -> None:
    """It would cost a copy of the served one at each update."""
    served = Served(StagingMode.DEVICE)
    rank, update = served.rank, served.rank.begin(partial=True)
    rank.send(update, [some(1, "fused.bias")])
    assert update.sealed is not None
    exchanged = {id(live) for live, _ in update.sealed.swap.pairs}
    assert id(served.live.fused.bias) in exchanged
    assert not {id(served.live.norm.weight), id(served.live.fused.weight)} & exchanged


@MODES
@pytest.mark.parametrize("missing", sorted(checkpoint(0)))
def test_whole_update_without_a_tensor_is_refused(mode: StagingMode, missing: str) -> None:
    served = Served(mode)
    sent = {name: tensor for name, tensor in checkpoint(1).items() if name != missing}
    with pytest.raises(Refused, match=rf"not complete.*not sent: {missing}\b"):
        served.rank.update(sent)
    assert served.serves()
    served.rank.update(checkpoint(2))
    assert served.serves(checkpoint(2))


@MODES
def test_whole_update_of_planned_tensors_alone_is_refused(mode: StagingMode) -> None:
    """The loader gets no tensor, and what is finished is missing."""
    served = Served(mode)
    sent = some(1, "norm.weight", "fused.upper", "fused.lower", "fused.bias")
    with pytest.raises(Refused, match=r"not sent: packed\.weight"):
        served.rank.update(sent)


@MODES
def test_weights_as_another_server_serves_them_replace_planned_ones(mode: StagingMode) -> None:
    served = Served(mode)
    other = serve(Model(), checkpoint(1))
    rank, update = served.rank, served.rank.begin()
    rank.prepare(update)
    others = {str(place): tensor for place, tensor in tensors_of(other).items()}
    for weight in rank.shadowed.kind.weights:
        rank.shadowed.take_saved(weight, others[weight.name])
    update.tensors = 1
    rank.seal(update)
    assert update.sealed is not None
    update.sealed.swap.make()
    assert served.serves(checkpoint(1))


class FailingAtTheEnd(Model):
    """Calls its finishing from the loader, which needs weights that an audit has not."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        if not bool(self.packed.weight.isfinite().all()) or not self.packed.weight.any():
            raise ValueError("packed.weight is missing")


def test_update_audits_its_plan_without_finishing() -> None:
    served = Served(StagingMode.DEVICE, FailingAtTheEnd)
    audited: list[tuple[int, int]] = []
    served.rank.shadowed.on_audit = lambda *counts: audited.append(counts)
    served.rank.update(checkpoint(1))
    assert audited == [(4, 0)]
    assert served.serves(checkpoint(1))


def test_module_of_a_weight_that_an_audit_finds_different_goes_by_the_loader() -> None:
    served = Served(StagingMode.DEVICE)
    served.rank.shadowed._leave_to_loader(audit.Differs("", ["fused.bias"]))
    assert served.planned == {"norm.weight"}
    served.rank.update(checkpoint(1))
    assert served.serves(checkpoint(1))


# ---- sparse tensors --------------------------------------------------------------------


def part(version: int, *names: str) -> Tensors:
    """Return the last but one element of each tensor of ``version``, and where it is."""
    found: Tensors = {}
    for name, tensor in some(version, *names).items():
        at = torch.tensor([tensor.numel() - 2])
        found |= {f"{name}.indices": at, f"{name}.values": tensor.view(-1)[at]}
    return found


def patched(version: int, *names: str) -> Tensors:
    """Return tensors of version 0, each with the element of ``part``."""
    tensors = some(0, *names)
    for tensor, other in zip(tensors.values(), some(version, *names).values(), strict=True):
        tensor.view(-1)[-2] = other.view(-1)[-2]
    return tensors


@MODES
@pytest.mark.parametrize(
    "names", [["norm.weight"], ["fused.lower"], ["norm.weight", "fused.upper", "fused.bias"]]
)
def test_elements_of_what_finishing_leaves_alone_are_replaced(
    mode: StagingMode, names: list[str]
) -> None:
    served = Served(mode)
    for version in (1, 2):
        served.rank.update(part(version, *names), partial=True, load_format="sparse")
        assert asked == []
        assert served.serves(patched(version, *names))
        asked.clear()


@MODES
def test_elements_of_a_finished_weight_are_refused_by_name(mode: StagingMode) -> None:
    served = Served(mode)
    sent = part(1, "norm.weight", "packed.weight")
    with pytest.raises(Refused, match=r"the target model.*send whole tensors packed\.weight"):
        served.rank.update(sent, partial=True, load_format="sparse")
    assert served.serves()


@MODES
def test_finished_weight_comes_whole_after_its_elements(mode: StagingMode) -> None:
    served = Served(mode)
    rank, update = served.rank, served.rank.begin(partial=True)
    rank.prepare(update)
    rank.fill(update, part(1, "packed.weight", "norm.weight", "fused.bias"), "sparse")
    assert update.unpatched == {"target": {"packed.weight"}}
    rank.fill(update, some(1, "packed.weight"))
    rank.seal(update)
    assert update.sealed is not None
    update.sealed.swap.make()
    assert served.serves(some(1, "packed.weight"), patched(1, "norm.weight", "fused.bias"))


@MODES
def test_tensors_that_are_finished_together_are_named_together(mode: StagingMode) -> None:
    served = Served(mode, finish=transposes_weight)
    rank, update = served.rank, served.rank.begin(partial=True)
    rank.prepare(update)
    rank.fill(update, part(1, "fused.lower"), "sparse")
    assert update.unpatched == {"target": {"fused.upper", "fused.lower", "fused.bias"}}


def test_module_of_many_tensors_is_named_by_one_set() -> None:
    """A set for each of a thousand experts' tensors would take gigabytes in a large model."""
    modules = {
        f"{module}.weight": frozenset(f"{module}.{expert}" for expert in range(9))
        for module in ("a", "b")
    }
    shared = {"c.weight": frozenset({"c", "ab"})}
    shared |= {f"{module}.bias": frozenset({"ab"}) for module in ("a", "b")}
    none = frozenset[Any]()
    together = Recipe({**modules, **shared}, none, none, none, none).together
    for module in ("a", "b"):
        names = modules[f"{module}.weight"]
        assert len({id(together[name]) for name in names}) == 1
        assert together[f"{module}.0"] == {*names, "ab"}
    assert together["c"] == {"c", "ab"}
    assert together["ab"] == together["a.0"] | together["b.0"] | {"c"}


@MODES
def test_elements_are_refused_of_a_finished_model_without_a_plan(
    mode: StagingMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rank, "plans", False)
    served = Served(mode)
    with pytest.raises(Refused, match=r"send whole tensors norm\.weight"):
        served.rank.update(part(1, "norm.weight"), partial=True, load_format="sparse")
    assert asked == []
    assert served.serves()


@MODES
@pytest.mark.parametrize("parts_first", [False, True])
def test_part_and_whole_of_a_tensor_in_one_update(mode: StagingMode, parts_first: bool) -> None:
    """The last one counts where it has elements."""
    served = Served(mode)
    rank, update = served.rank, served.rank.begin(partial=True)
    rank.prepare(update)
    expected = some(2, "norm.weight")
    if parts_first:
        rank.fill(update, part(1, "norm.weight"), "sparse")
        rank.fill(update, expected)
    else:
        rank.fill(update, expected)
        rank.fill(update, part(1, "norm.weight"), "sparse")
        expected = {name: tensor.clone() for name, tensor in expected.items()}
        patch = part(1, "norm.weight")
        at = patch["norm.weight.indices"]
        expected["norm.weight"].view(-1)[at] = patch["norm.weight.values"]
    rank.seal(update)
    assert update.sealed is not None
    update.sealed.swap.make()
    assert served.serves(expected)


# ---- tensors outside of the plan -------------------------------------------------------


WHOLE = torch.full((4, 3), 7.0)


@MODES
@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.usefixtures("unaudited")
def test_module_goes_by_the_loader_after_a_tensor_that_is_in_no_plan(
    mode: StagingMode, is_partial: bool
) -> None:
    served = Served(mode)
    sent = {"fused.weight": WHOLE, **checkpoint(1)}
    served.rank.update(sent, partial=is_partial)
    assert asked == [name for name in sent if name != "norm.weight"]
    assert served.serves(checkpoint(1))


@MODES
@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize("in_one_call", [False, True])
def test_module_whose_part_was_moved_is_refused_to_the_loader(
    mode: StagingMode, is_partial: bool, in_one_call: bool
) -> None:
    """Finishing takes whole modules, and what was moved is staged already."""
    served = Served(mode)
    before, after = some(1, "fused.bias"), {"fused.weight": WHOLE}
    calls = [{**before, **after}] if in_one_call else [before, after]
    if not is_partial:
        calls.insert(0, some(1, "norm.weight", "packed.weight"))
    with pytest.raises(Refused, match=r"'fused' as a whole.*send together.*fused\.bias"):
        served.rank.update(*calls, partial=is_partial)
    assert served.serves()


@MODES
@pytest.mark.parametrize("is_partial", [False, True])
def test_tensors_sent_twice_count_as_sent_last(mode: StagingMode, is_partial: bool) -> None:
    served = Served(mode)
    served.rank.update(checkpoint(1), checkpoint(2), partial=is_partial)
    assert served.serves(checkpoint(2))


@pytest.mark.parametrize("plans", [False, True])
@MODES
def test_half_sent_again_does_not_bring_back_the_served_other_half(
    mode: StagingMode, plans: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rank, "plans", plans)
    served = Served(mode)
    whole = some(1, "fused.upper", "fused.lower", "fused.bias")
    if plans:
        served.rank.update(whole, some(2, "fused.upper"), partial=True)
        assert served.serves(checkpoint(0) | whole | some(2, "fused.upper"))
        return
    with pytest.raises(Refused, match=r"send together.*fused\.lower"):
        served.rank.update(whole, some(2, "fused.upper"), partial=True)


# ---- what is planned -------------------------------------------------------------------


def transposes_weight(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)


def sets_a_number(layer: Any) -> None:
    layer.factor = 2.0


def sets_a_number_of_its_method(layer: Any) -> None:
    layer.quant_method.factor = 2.0


def adds_a_tensor(layer: Any) -> None:
    layer.table = torch.ones(3)


def adds_a_view(layer: Any) -> None:
    layer.upper = layer.weight.data[:2]


def halves_large_values(layer: Any) -> None:
    if float(layer.weight.data.max()) > 100:
        layer.weight.data.div_(2)


def halves_one_value(layer: Any) -> None:
    """Look for a value that hardly comes by chance."""
    if float(layer.weight.data.max()) == 100:
        layer.weight.data.div_(2)


def halves_large_values_unseen(layer: Any) -> None:
    values = layer.weight.data.numpy()
    if values.max() > 100:
        values /= 2


def refuses_large_values_unseen(layer: Any) -> None:
    if layer.weight.data.numpy().max() > 100:
        raise ValueError("no kernel for large values")


def flags_large_values_unseen(layer: Any) -> None:
    if layer.weight.data.numpy().max() > 100:
        layer.is_large = True


def deletes_the_bias(layer: Any) -> None:
    del layer.bias


@MODES
@pytest.mark.parametrize(
    "finish",
    [
        transposes_weight,
        sets_a_number,
        sets_a_number_of_its_method,
        adds_a_tensor,
        adds_a_view,
        halves_large_values,
        halves_one_value,
        halves_large_values_unseen,
        refuses_large_values_unseen,
        flags_large_values_unseen,
        deletes_the_bias,
    ],
)
def test_module_in_which_finishing_has_a_part_is_not_planned(
    mode: StagingMode, finish: Finish
) -> None:
    served = Served(mode, finish=finish)
    assert served.planned == {"norm.weight"}
    served.rank.update(checkpoint(1))
    assert served.serves(checkpoint(1))


def views_transposed(layer: Any) -> None:
    """Transpose by strides alone, as for kernels that want columns."""
    layer.weight = nn.Parameter(layer.weight.t(), requires_grad=False)


def views_flat(layer: Any) -> None:
    layer.weight.data = layer.weight.data.view(-1)


def copies(layer: Any) -> None:
    """Give the content other memory, as SGLang does with a new parameter beside a device."""
    layer.weight = nn.Parameter(torch.from_numpy(layer.weight.data.numpy().copy()), False)


@MODES
@pytest.mark.parametrize("finish", [views_transposed, views_flat, copies])
@pytest.mark.usefixtures("unaudited")
def test_weight_whose_memory_finishing_keeps_is_planned(mode: StagingMode, finish: Finish) -> None:
    served = Served(mode, finish=finish)
    assert served.planned == KEPT
    update_twice(served)
    served.rank.update(some(3, "fused.lower"), partial=True)
    assert served.serves(checkpoint(2), some(3, "fused.lower"))
    asked.clear()
    served.rank.update(part(4, "fused.upper"), partial=True, load_format="sparse")
    assert asked == []
    expected = checkpoint(2) | some(3, "fused.lower")
    upper = expected["fused.upper"].clone()
    upper.view(-1)[-2] = checkpoint(4)["fused.upper"].view(-1)[-2]
    assert served.serves(expected, {"fused.upper": upper})
    served.rank.roll_back()
    assert served.serves(expected)


def equals_transposed_by_chance(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)


def transposes_unseen(layer: Any) -> None:
    values = layer.weight.data.numpy()
    layer.weight = nn.Parameter(torch.from_numpy(values.T.copy()), requires_grad=False)


def transposes_large_unseen(layer: Any) -> None:
    """See the same memory in a shape that its content chooses."""
    data = layer.weight.data
    layer.weight = nn.Parameter(data.t() if data.numpy().max() > 100 else data, False)


@MODES
@pytest.mark.parametrize(
    "finish", [equals_transposed_by_chance, transposes_unseen, transposes_large_unseen]
)
def test_weight_whose_memory_finishing_keeps_by_chance_is_not_planned(
    mode: StagingMode, finish: Finish
) -> None:
    alike = {name: torch.ones_like(tensor) for name, tensor in checkpoint(0).items()}
    served = Served(mode, start=alike, finish=finish)
    assert served.planned == {"norm.weight"}
    large = {name: tensor + 1000 for name, tensor in checkpoint(1).items()}
    if finish is transposes_large_unseen:
        with pytest.raises(Refused, match=r"makes 'fused\.weight' as .* and it is served as"):
            served.rank.update(large)
        assert served.serves()
        return
    served.rank.update(large)
    assert served.serves(large)


class OfFP8(Model):
    """One scale for each channel, for SGLang's own method."""

    def __init__(self) -> None:
        super().__init__()
        method = W8A8Fp8LinearMethod(W8A8Fp8Config(is_checkpoint_fp8_serialized=True))
        fused: Any = self.fused
        del fused.bias
        fused.quant_method = method
        fused.weight = nn.Parameter(torch.empty(4, 3, dtype=torch.float8_e4m3fn), False)
        fused.weight_scale = nn.Parameter(torch.empty(4, 1), requires_grad=False)


def in_fp8(version: int) -> Tensors:
    tensors = checkpoint(version)
    for name in ("fused.upper", "fused.lower"):
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors["fused.weight_scale"] = tensors.pop("fused.bias").view(4, 1)
    return tensors


@MODES
@pytest.mark.usefixtures("unaudited")
def test_fp8_with_scales_of_channels_is_planned(mode: StagingMode) -> None:
    served = Served(mode, OfFP8, in_fp8(0))
    assert served.live.fused.weight.shape == (3, 4)
    assert served.planned == {"norm.weight", "fused.weight", "fused.weight_scale"}
    for version in (1, 2):
        served.rank.update(in_fp8(version))
        assert asked == ["packed.weight"]
        assert served.serves(in_fp8(version))
        asked.clear()
    served.rank.update({"fused.upper": in_fp8(3)["fused.upper"]}, partial=True)
    assert served.serves(in_fp8(2), {"fused.upper": in_fp8(3)["fused.upper"]})


class Noting(Model):
    """Notes a number in ``fused`` while it loads, as SGLang's mixtures of experts do."""

    def __init__(
        self, number: Callable[[Any, torch.Tensor], object], finish: Finish = leaves_alone
    ) -> None:
        super().__init__(finish)
        self.number = number

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        def noted() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                yield name, tensor
                if name == "fused.bias":
                    self.number(self.fused, tensor)

        super().load_weights(noted())


def notes_its_width(layer: Any, bias: torch.Tensor) -> None:
    layer.width = len(bias)


def notes_its_largest(layer: Any, bias: torch.Tensor) -> None:
    layer.largest = float(bias.max())


def notes_its_width_unless_it_is_large(layer: Any, bias: torch.Tensor) -> None:
    layer.width = 0 if bool((bias > 100).any()) else len(bias)


def doubles_its_width(layer: Any) -> None:
    layer.width *= 2


@MODES
@pytest.mark.parametrize(
    ("number", "finish", "planned"),
    [
        (notes_its_width, leaves_alone, KEPT),
        (notes_its_width, doubles_its_width, {"norm.weight"}),
        (notes_its_largest, leaves_alone, {"norm.weight"}),
        (notes_its_width_unless_it_is_large, leaves_alone, {"norm.weight"}),
    ],
)
def test_module_with_a_number_of_its_loader_is_planned_if_no_content_makes_it(
    mode: StagingMode, number: Any, finish: Finish, planned: set[str]
) -> None:
    served = Served(mode, Noting, number=number, finish=finish)
    assert served.planned == planned
    large = checkpoint(2)
    large["fused.bias"] += 1000.0
    for sent in (checkpoint(1), large):
        served.rank.update(sent)
        assert served.serves(sent)
    expected = serve(Noting(number, finish), large)
    for name in ("width", "largest"):
        assert getattr(served.live.fused, name, None) == getattr(expected.fused, name, None)


class Computing(Model):
    """Makes a product of a weight after loading, as MLA does."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.product = self.norm.weight.data * 3
        self.largest = float(self.norm.weight.data.max())


@MODES
def test_weight_that_post_load_reads_is_not_planned(mode: StagingMode) -> None:
    served = Served(mode, Computing)
    assert served.planned == KEPT - {"norm.weight"}
    served.rank.update(checkpoint(1))
    assert served.serves(checkpoint(1))


class Tied(Model):
    """Two modules have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Layer(None)
        self.head.weight = self.norm.weight


@MODES
def test_weight_of_two_modules_is_not_planned(mode: StagingMode) -> None:
    assert Served(mode, Tied).planned == KEPT - {"norm.weight"}


class Peeping(Model):
    """Finishes a module by another one's weight, if its own is large."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()

        def finish(layer: Any) -> None:
            if float(layer.weight.data.max()) > 100:
                if writes:
                    layer.others[0].weight.data.zero_()
                else:
                    layer.weight.data.copy_(layer.others[0].weight.data)
            quantize(layer)

        packed: Any = self.packed
        packed.quant_method, packed.others = Finishing(finish), [self.norm]


@MODES
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("is_partial", [False, True])
# finished when it has come, and at the seal
@pytest.mark.parametrize("name", ["packed.weight", "packed.again"])
def test_planned_weight_that_another_finishing_uses_is_refused(
    mode: StagingMode, writes: bool, is_partial: bool, name: str
) -> None:
    """It holds nothing where finishing looks for it."""
    served = Served(mode, Peeping, writes=writes)
    assert served.planned == KEPT
    sent = checkpoint(1)
    del sent["packed.weight"]
    with pytest.raises(Refused, match=r"finishing the update uses 'norm\.weight'"):
        served.rank.update(sent | {name: torch.full((4, 3), 200.0)}, partial=is_partial)
    assert served.serves()


class PeepingAtTheEnd(Model):
    """Computes with one weight after loading, if another one is large."""

    def post_load_weights(self) -> None:
        self.largest = float(self.packed.weight.data.max())
        if self.largest > 100:
            self.largest += float(self.norm.weight.data.max())


@MODES
@pytest.mark.parametrize("is_partial", [False, True])
def test_planned_weight_that_post_load_uses_is_refused(mode: StagingMode, is_partial: bool) -> None:
    """Neither what holds nothing nor what is served is what the update brings."""
    served = Served(mode, PeepingAtTheEnd)
    assert served.planned == KEPT
    sent = checkpoint(1) | {"packed.weight": torch.full((4, 3), 200.0)}
    with pytest.raises(Refused, match=r"finishing the update uses 'norm\.weight'"):
        served.rank.update(sent, partial=is_partial)
    assert served.serves()


def test_weight_that_another_model_owns_is_not_written() -> None:
    served = Served(StagingMode.DEVICE)
    shadowed = served.rank.shadowed
    copies = WholeCopies(StagingMode.DEVICE, swap_for(CPU), UNPACED, torch.empty_like)
    form = DigestedForm(copies, UNPACED)
    shadowed.build(CPU, [served.live.norm], form, UNPACED, 0, check_finite=True)
    shadowed.begin(is_partial=True)
    replay: Any = shadowed._replay
    assert {name for name in KEPT if replay.has(name)} == KEPT - {"norm.weight"}


def plan_of(live: nn.Module) -> Plan:
    weights = {name: t for name, t in live.named_parameters() if name in KEPT}
    return Plan.of(record(Model(), KINDS), KINDS, weights)


def test_module_that_is_planned_in_part_goes_by_the_loader() -> None:
    live = serve(Model(), checkpoint(0))
    recipe = found(Model(), live, checkpoint(0))
    weights = plannable(live, recipe)
    assert weights.keys() == KEPT
    plan = plan_of(live)
    plan.drop("fused.bias", "the served weight has another content than its moves give")
    leave_torn(plan, recipe, live, weights)
    assert plan.writers.keys() == {"norm.weight"}
    assert plan.by_loader["fused.upper"] == "'fused' is finished as a whole"


@pytest.mark.parametrize(
    "made_of",
    [
        {"norm.weight": {"norm.gain"}},
        {"norm.weight": {"norm.weight", "norm.gain"}},
        {"packed.weight": {"packed.weight", "norm.weight"}},
    ],
)
def test_tensor_that_loading_puts_elsewhere_goes_by_the_loader(
    made_of: dict[str, set[str]],
) -> None:
    """Loading from disk may rename tensors, and the plan is of the names in a checkpoint."""
    live = serve(Model(), checkpoint(0))
    recipe = found(Model(), live, checkpoint(0))
    recipe.names.update({place: frozenset(names) for place, names in made_of.items()})
    plan = plan_of(live)
    leave_torn(plan, recipe, live, plannable(live, recipe))
    assert plan.writers.keys() == KEPT - {"norm.weight"}
    assert "norm.weight" in plan.by_loader


# ---- the search ------------------------------------------------------------------------


class Searching(Served):
    """A rank that has no plan yet, and reads ``start`` for the proof."""

    def __init__(self, start: Tensors) -> None:
        super().__init__(StagingMode.CHANGES)
        findings: Any = self.rank.shadowed.findings
        findings.plan = None
        findings._kinds = KINDS
        findings._name_recipe = lambda pristine, layout: "name"
        findings._read_start_checkpoint = lambda check, rate_limit, wants: self._read(start)
        self.reads = 0

    def _read(self, start: Tensors) -> Iterable[tuple[str, torch.Tensor]]:
        self.reads += 1
        return iter(start.items())

    def search(self) -> None:
        self.rank.shadowed.findings.find_plan(CPU, lambda: None, UNPACED, {})
        asked.clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_INFLIGHT_CACHE", str(tmp_path))


@pytest.mark.usefixtures("cache", "unaudited")
def test_plan_is_found_with_the_served_checkpoint_and_remembered() -> None:
    reads = 0
    for _ in range(2):
        served = Searching(checkpoint(0))
        served.search()
        served.rank.update(checkpoint(1))
        assert asked == ["packed.weight"]
        assert served.serves(checkpoint(1))
        reads += served.reads
    assert reads == 1


@pytest.mark.usefixtures("cache")
def test_weight_that_its_moves_do_not_make_leaves_its_module_to_the_loader() -> None:
    served = Searching(checkpoint(0) | some(1, "fused.bias"))
    served.search()
    assert served.planned == {"norm.weight"}


@pytest.mark.usefixtures("cache")
def test_remembered_plan_of_a_part_of_a_module_leaves_it_to_the_loader() -> None:
    served = Searching(checkpoint(0))
    plan = plan_of(served.live)
    plan.drop("fused.bias", "")
    remember("name", plan)
    served.search()
    assert served.planned == {"norm.weight"}
    assert not served.reads
