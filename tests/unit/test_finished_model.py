"""Updates of a model that is finished after loading, beside the served one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from sglang_inflight.scheduler.update.finished import raw_model
from sglang_inflight.scheduler.update.finished.finished_model import FinishedModel
from sglang_inflight.scheduler.update.finished.places import (
    Number,
    Place,
    numbers_of,
    tensors_of,
)
from sglang_inflight.scheduler.update.finished.proof import Proof, find_recipe
from sglang_inflight.scheduler.update.finished.raw_model import Made
from sglang_inflight.scheduler.update.finished.recipe import Recipe, describe_layout
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.swap import PreparedSwap
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import Refused, Unproven
from tests.support import rank as support
from tests.unit.finishing import Finish, Finishing

pytestmark = pytest.mark.usefixtures("either_way")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def quantize(layer: Any) -> None:
    """Transpose, replace the parameter, derive a scale, a list and a number, as kernels ask."""
    scale = layer.weight.data.abs().amax(dim=1)
    layer.weight = nn.Parameter((layer.weight.data / scale[:, None]).t().contiguous(), False)
    layer.scale = scale
    layer.per_kernel = [scale * 2, "fp8"]
    layer.factor = float(scale[0])


class Linear(nn.Module):
    def __init__(self, finish: Finish | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3), requires_grad=False)
        self.table = torch.zeros(3)
        if finish is not None:
            self.quant_method = Finishing(finish)


class Model(nn.Module):
    """``plain`` is not finished, ``a`` and ``b`` are; ``a`` is fused from two tensors.

    ``product`` is made of ``plain`` after loading, as MLA's are.
    """

    def __init__(self, finish: Finish = quantize) -> None:
        super().__init__()
        self.plain, self.a, self.b = Linear(None), Linear(finish), Linear(finish)
        self.product: torch.Tensor | None = None
        self.largest = -1.0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters: dict[str, Any] = dict(self.named_parameters())
        for name, tensor in weights:
            if name in ("a.upper", "a.lower"):
                half = slice(0, 2) if name == "a.upper" else slice(2, 4)
                parameters["a.weight"].data[half].copy_(tensor)
            else:
                default_weight_loader(parameters[name], tensor)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.product = (self.plain.weight.data * 3).t()
        self.largest = float(self.plain.weight.data.max())


def checkpoint(version: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(version)
    return {
        "plain.weight": torch.randn(4, 3),
        "a.upper": torch.randn(2, 3),
        "a.lower": torch.randn(2, 3),
        "b.weight": torch.randn(4, 3),
    }


def served(
    version: int,
    finish: Finish = quantize,
    changed: Mapping[str, torch.Tensor] = MappingProxyType({}),
    kind: type[Model] = Model,
) -> Any:
    """Return the model as SGLang serves it: loaded and finished."""
    model = kind(finish)
    model.load_weights({**checkpoint(version), **changed}.items())
    for layer in (model.a, model.b):
        layer.quant_method.process_weights_after_loading(layer)
    return model


def found(
    pristine: nn.Module,
    live: nn.Module,
    version: Mapping[str, torch.Tensor] | None = None,
    device: torch.device = CPU,
) -> Recipe:
    loaded = {memory_key(tensor) for tensor in tensors_of(live).values()}
    weights = (version or checkpoint(0)).items()
    return find_recipe(pristine, live, device, weights, UNPACED, 1 << 30, loaded)


def _numbers(model: nn.Module) -> dict[Place, Number]:
    return {place: number for place, (_, _, number) in numbers_of(model).items()}


class Rank:
    """A served model with its staging, without a scheduler."""

    def __init__(
        self,
        form: str = "changes",
        *,
        finish: Finish = quantize,
        holds_graphs: bool = False,
        version: Mapping[str, torch.Tensor] = MappingProxyType({}),
        kind: type[Model] = Model,
        device: torch.device = CPU,
    ) -> None:
        """``version``: tensors of the served checkpoint that are not those of version 0.

        ``device``: where finishing runs, see ``imaginary_device``.
        """
        self.live: Any = served(0, finish, version, kind)
        self._version = {**checkpoint(0), **version}
        self.pristine = kind(finish)
        self._device = device
        self._rank = support.Rank(
            StagingMode[form.upper()],
            self.live,
            checkpoint_shapes={name: tensor.shape for name, tensor in self._version.items()},
        )
        self._rank.finish_after_loading(self.pristine, self.recipe())
        if holds_graphs:
            runner: Any = self._rank.shadowed.runner
            runner.decode_cuda_graph_runner = self

    @property
    def shadow(self) -> FinishedModel:
        shadow = self._rank.shadowed.kind
        assert isinstance(shadow, FinishedModel)
        return shadow

    def recipe(self) -> Recipe:
        return found(self.pristine, self.live, self._version, self._device)

    @property
    def planned(self) -> set[str]:
        """Names of the weights that updates write by moves."""
        plan = self._rank.shadowed.findings.plan
        return set() if plan is None else {*plan.writers}

    def begin(self, *, is_partial: bool = False) -> None:
        self._update = self._rank.begin(partial=is_partial)
        self._rank.prepare(self._update)
        self.shadow._device = self._device

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._rank.fill(self._update, dict(weights))

    def seal(self) -> PreparedSwap:
        self._rank.seal(self._update)
        assert self._update.sealed is not None
        return self._update.sealed.swap

    def update(self, version: int) -> PreparedSwap:
        self.begin()
        self.load(checkpoint(version).items())
        return self.seal()

    def is_as(self, expected: Any) -> bool:
        mine, other = tensors_of(self.live), tensors_of(expected)
        return (
            mine.keys() == other.keys()
            and all(torch.equal(mine[place], other[place]) for place in mine)
            and _numbers(self.live) == _numbers(expected)
        )


@pytest.mark.parametrize("form", ["changes", "device"])
def test_commit_brings_everything_that_finishing_makes(form: str) -> None:
    rank = Rank(form)
    addresses = {place: id(tensor) for place, tensor in tensors_of(rank.live).items()}
    swap = rank.update(1)
    assert rank.is_as(served(0))
    swap.make()
    assert rank.is_as(served(1))
    assert {place: id(tensor) for place, tensor in tensors_of(rank.live).items()} == addresses
    rank.update(2).make()
    assert rank.is_as(served(2))


@pytest.mark.parametrize("form", ["changes", "device"])
def test_rollback_brings_back_everything(form: str) -> None:
    rank = Rank(form)
    swap = rank.update(1)
    swap.make()
    swap.make()
    assert rank.is_as(served(0))


def test_dropped_update_leaves_nothing_behind() -> None:
    rank = Rank()
    rank.begin()
    weights = checkpoint(1)
    del weights["a.lower"]
    rank.load(weights.items())
    rank.update(2).make()
    assert rank.is_as(served(2))


def test_dropped_update_gives_its_memory_back() -> None:
    rank = Rank()
    rank.begin()
    rank.load([("a.upper", checkpoint(1)["a.upper"])])
    assert any(w.handle.is_touched() for w in rank.shadow._of_module["a"])
    rank.shadow.forget()
    assert not any(w.handle.is_touched() for w in rank.shadow._of_module["a"])


def equalizes(layer: Any) -> None:
    """Like a kernel with one scale for a fused layer: write the weight if its parts differ."""
    largest = layer.weight.data.abs().amax(dim=1)
    if (largest != largest[0]).any():
        layer.weight.data.div_(largest[:, None])


def test_part_is_refused_where_finishing_left_the_weight_alone_by_chance() -> None:
    """The served parts need no change, so their loaded form seems to be there."""
    alike = {name: torch.ones_like(tensor) for name, tensor in checkpoint(0).items()}
    rank = Rank(finish=equalizes, version=alike)
    rank.begin(is_partial=True)
    rank.load([("a.upper", 2 * alike["a.upper"])])
    with pytest.raises(Refused, match=r"send together a\.lower, a\.upper"):
        rank.seal()


class ProductOfTwo(Model):
    def post_load_weights(self) -> None:
        self.product = self.plain.weight.data * self.a.weight.data


def test_post_load_is_not_shown_a_weight_that_finishing_left_alone_by_chance() -> None:
    """After the next update it is served in another form than it was loaded in."""
    alike = {name: torch.ones_like(tensor) for name, tensor in checkpoint(0).items()}
    rank = Rank(finish=equalizes, version=alike, kind=ProductOfTwo)
    rank.update(1).make()
    assert rank.is_as(served(1, equalizes, kind=ProductOfTwo))
    rank.begin(is_partial=True)
    rank.load([("plain.weight", checkpoint(2)["plain.weight"])])
    with pytest.raises(Refused, match=r"send together a\.lower, a\.upper"):
        rank.seal()


def test_module_is_finished_and_its_memory_given_back_when_its_tensors_have_come() -> None:
    rank = Rank()
    rank.begin()
    weights = checkpoint(1)
    rank.load([("b.weight", weights["b.weight"])])
    assert rank.shadow.has_finished("b")
    assert not any(w.handle.is_touched() for w in rank.shadow._of_module["b"])


def test_halves_of_a_fused_tensor_come_in_two_calls() -> None:
    rank = Rank()
    rank.begin()
    for name, tensor in checkpoint(1).items():
        rank.load([(name, tensor)])
    rank.seal().make()
    assert rank.is_as(served(1))


def test_half_of_a_module_is_refused_with_the_names_that_belong_together() -> None:
    rank = Rank()
    rank.begin(is_partial=True)
    rank.load([("a.upper", checkpoint(1)["a.upper"])])
    with pytest.raises(Refused, match=r"send together a\.lower, a\.upper"):
        rank.seal()
    assert rank.is_as(served(0))


def test_whole_update_without_a_tensor_is_refused() -> None:
    rank = Rank()
    rank.begin()
    weights = checkpoint(1)
    del weights["plain.weight"]
    rank.load(weights.items())
    with pytest.raises(Refused, match=r"not sent: plain\.weight"):
        rank.seal()


def test_partial_update_brings_whole_modules_and_leaves_the_others() -> None:
    rank = Rank()
    rank.begin(is_partial=True)
    one = checkpoint(1)
    rank.load([("b.weight", one["b.weight"])])
    rank.seal().make()
    assert rank.is_as(served(0, changed={"b.weight": one["b.weight"]}))
    rank.begin(is_partial=True)
    rank.load([("plain.weight", one["plain.weight"])])
    rank.seal().make()
    sent = {name: one[name] for name in ("plain.weight", "b.weight")}
    assert rank.is_as(served(0, changed=sent))


@pytest.mark.parametrize("form", ["changes", "device"])
def test_update_of_nothing_leaves_the_served_model_and_can_be_rolled_back(form: str) -> None:
    rank = Rank(form)
    rank.begin(is_partial=True)
    rank.load([])
    swap = rank.seal()
    for _ in range(2):
        swap.make()
        assert rank.is_as(served(0))


def test_tensor_sent_twice_counts_as_sent_last() -> None:
    rank = Rank()
    rank.begin()
    rank.load(checkpoint(1).items())
    rank.load([("b.weight", checkpoint(2)["b.weight"])])
    rank.seal().make()
    assert rank.is_as(served(1, changed={"b.weight": checkpoint(2)["b.weight"]}))


def test_number_in_captured_graphs_is_refused() -> None:
    rank = Rank(holds_graphs=True)
    with pytest.raises(Refused, match=r"'a\.factor'.*captured CUDA graphs"):
        rank.update(1)


def cuts(layer: Any) -> None:
    """Keep as many rows as the weights say."""
    layer.rows = layer.weight.data[: 1 + int(layer.weight.data[0, 0] > 1.5)].clone()


def test_another_shape_is_refused() -> None:
    rank = Rank(finish=cuts)
    rank.begin()
    larger = checkpoint(1) | {"b.weight": torch.full((4, 3), 2.0)}
    with pytest.raises(Refused, match=r"'b\.rows' as float32 of shape \[2, 3\]"):
        rank.load(larger.items())


def test_write_into_a_served_tensor_is_refused() -> None:
    """Finishing that finds the served model by other means would change what is served."""
    rank = Rank()

    def writes(layer: Any) -> None:
        quantize(layer)
        rank.live.b.scale.zero_()

    rank.begin()
    raw: Any = rank.shadow.model
    raw.b.quant_method._finish = writes
    with pytest.raises(Refused, match=r"'b\.scale' where it is being served"):
        rank.load(checkpoint(1).items())
    assert rank.is_as(served(0))


def test_served_tensor_that_was_replaced_is_refused() -> None:
    rank = Rank()
    rank.begin()
    rank.live.b.scale = rank.live.b.scale.clone()
    with pytest.raises(Refused, match=r"'b\.scale' was replaced"):
        rank.shadow.begin(None, is_partial=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda live: live.a.scale.add_(1), r"'a\.scale' with other values"),
        (lambda live: setattr(live.a, "factor", 2.0), r"sets 'a\.factor'"),
        (lambda live: setattr(live.plain, "cache", torch.ones(2)), r"has 'plain\.cache'"),
        (lambda live: delattr(live.b, "scale"), r"makes 'b\.scale', and the served model has none"),
        (lambda live: setattr(live.b, "scale", torch.ones(9)), r"'b\.scale' as float32 of shape"),
    ],
)
def test_model_that_finishing_does_not_make_is_unproven(
    change: Callable[[Any], object], reason: str
) -> None:
    live = served(0)
    change(live)
    with pytest.raises(Unproven, match=reason):
        found(Model(), live)


def test_finishing_that_runs_only_once_is_unproven() -> None:
    def breaks(layer: Any) -> None:
        raise RuntimeError("no kernel for this device")

    with pytest.raises(Unproven, match="no kernel for this device"):
        found(Model(breaks), served(0))


def consumes(layer: Any) -> None:
    """Keep a product and not the weight, as MiniCPM3 does."""
    layer.doubled = layer.weight.data * 2
    del layer.weight


@pytest.mark.parametrize("form", ["changes", "device"])
def test_weight_that_finishing_deletes_is_updated_by_what_is_made_of_it(form: str) -> None:
    rank = Rank(form, finish=consumes)
    swap = rank.update(1)
    swap.make()
    assert rank.is_as(served(1, consumes))
    swap.make()
    assert rank.is_as(served(0, consumes))
    rank.begin(is_partial=True)
    rank.load([("a.upper", checkpoint(1)["a.upper"])])
    with pytest.raises(Refused, match=r"send together a\.lower, a\.upper"):
        rank.seal()


class Consuming(Model):
    """Its loader keeps a product in place of a module, as MiniCPM3's does."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        self.doubled = self.plain.weight.data * 2
        del self.plain

    def post_load_weights(self) -> None:
        pass


@pytest.mark.parametrize("form", ["changes", "device"])
def test_module_that_loading_deletes_is_updated_by_what_is_made_of_it(form: str) -> None:
    rank = Rank(form, kind=Consuming)
    swap = rank.update(1)
    swap.make()
    assert rank.is_as(served(1, kind=Consuming))
    swap.make()
    assert rank.is_as(served(0, kind=Consuming))


def test_view_of_another_weight_goes_with_it() -> None:
    def views(layer: Any) -> None:
        layer.upper = layer.weight.data[:2]

    rank = Rank(finish=views)
    swap = rank.update(1)
    swap.make()
    assert torch.equal(rank.live.a.upper, served(1, views).a.upper)
    swap.make()
    assert torch.equal(rank.live.a.upper, served(0, views).a.upper)


# the elements of each weight, and its copy
Moved = list[tuple[int, weakref.ref[torch.Tensor]]]


@pytest.fixture
def imaginary_device(monkeypatch: pytest.MonkeyPatch) -> Moved:
    """Let copies in other memory of the host be a device. Return the weights that went there.

    SGLang stages a module on the device for its finishing, and brings the results back.
    """
    moved: Moved = []

    def to_device(device: torch.device, data: torch.Tensor) -> torch.Tensor:
        copy = data.clone()
        moved.append((data.numel(), weakref.ref(copy)))
        return copy

    @contextmanager
    def on_device(module: nn.Module, device: torch.device) -> Iterator[None]:
        moves = device != CPU
        staged = [(p, p.data, p.data.clone()) for p in module.parameters() if moves]
        for parameter, _, there in staged:
            parameter.data = there
        yield
        known = {id(parameter): (here, there) for parameter, here, there in staged}
        for parameter in module.parameters() if moves else ():
            # a new one gets new memory
            here, there = known.get(id(parameter), (parameter.data, parameter.data.clone()))
            is_there = parameter.data_ptr() == there.data_ptr()
            if is_there and describe_layout(parameter) == describe_layout(there):
                here.copy_(there)
                parameter.data = here
            else:
                parameter.data = parameter.data.clone()

    monkeypatch.setattr(raw_model, "_on", to_device)
    monkeypatch.setattr(raw_model, "_free_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(raw_model, "device_loading_context", on_device)
    return moved


@pytest.mark.parametrize("form", ["changes", "device"])
def test_weight_that_post_load_reads_on_the_device_goes_live(
    form: str, imaginary_device: Moved
) -> None:
    """MLA's ``kv_b_proj`` is read there, and serves prompts besides its products."""
    rank = Rank(form, device=CUDA)
    swap = rank.update(1)
    swap.make()
    assert rank.is_as(served(1))
    swap.make()
    assert rank.is_as(served(0))
    rank.update(2).make()
    assert rank.is_as(served(2))
    rank.begin(is_partial=True)
    rank.load([("plain.weight", checkpoint(3)["plain.weight"])])
    rank.seal().make()
    assert rank.is_as(served(2, changed={"plain.weight": checkpoint(3)["plain.weight"]}))


def test_proof_moves_only_the_weights_that_post_load_reads(imaginary_device: Moved) -> None:
    Rank(device=CUDA)
    assert [elements for elements, _ in imaginary_device] == [12]


def test_seal_gives_back_the_memory_of_the_device(imaginary_device: Moved) -> None:
    rank = Rank(device=CUDA)
    rank.update(1)
    assert len(imaginary_device) == 2
    assert all(copy() is None for _, copy in imaginary_device)


class Scaling(Model):
    """Scales a weight in place after loading, as LongCat does with its norms."""

    def post_load_weights(self) -> None:
        self.plain.weight.data *= 2
        super().post_load_weights()


class ScalingUnseen(Model):
    """Scales a weight by a kernel that torch's dispatcher does not see."""

    def post_load_weights(self) -> None:
        self.plain.weight.data.numpy()[:] *= 2
        super().post_load_weights()


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("kind", [Scaling, ScalingUnseen])
def test_weight_that_post_load_scales_goes_live_scaled(
    kind: type[Model], device: torch.device, imaginary_device: Moved
) -> None:
    rank = Rank(kind=kind, device=device)
    assert "plain.weight" not in rank.recipe().untouched
    for version in (1, 2):
        rank.update(version).make()
        assert rank.is_as(served(version, kind=kind))


def doubles_unseen(layer: Any) -> None:
    """Write the weight by a kernel that torch's dispatcher does not see, as Triton's."""
    layer.weight.data.numpy()[:] *= 2


def gives_other_memory(layer: Any) -> None:
    layer.weight.data = layer.weight.data * 2


def views_as_integers(layer: Any) -> None:
    layer.weight.data = layer.weight.data.view(torch.int32)


def flags(layer: Any) -> None:
    """Finish a weight that has no flag yet, as FP8's scales for DeepGEMM."""
    if not getattr(layer.weight, "is_doubled", False):
        layer.weight.data = layer.weight.data * 2
        layer.weight.is_doubled = True


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("finish", [doubles_unseen, gives_other_memory, views_as_integers, flags])
def test_parameter_that_finishing_changes_goes_live_and_is_not_finished_twice(
    finish: Finish, device: torch.device, imaginary_device: Moved
) -> None:
    rank = Rank(finish=finish, device=device)
    assert rank.recipe().untouched == {"plain.weight"}
    for version in (1, 2):
        rank.update(version).make()
        assert rank.is_as(served(version, finish))
    rank.begin(is_partial=True)
    rank.load([("a.upper", checkpoint(1)["a.upper"])])
    with pytest.raises(Refused, match=r"send together a\.lower, a\.upper"):
        rank.seal()
    assert rank.is_as(served(2, finish))


def hides(layer: Any) -> None:
    """Keep a tensor and a number in attributes of the weight, as FP8's for some kernels."""
    layer.weight.rows = layer.weight.data.sum(dim=1)
    layer.weight.largest = float(layer.weight.data.max())


@pytest.mark.parametrize("form", ["changes", "device"])
def test_what_finishing_keeps_in_attributes_of_a_weight_goes_live(form: str) -> None:
    rank = Rank(form, finish=hides)
    for version in (1, 2):
        rank.update(version).make()
        weight, expected = rank.live.a.weight, served(version, hides).a.weight
        assert torch.equal(weight.rows, expected.rows)
        assert weight.largest == expected.largest


def leaves_alone(layer: Any) -> None:
    pass


def renews(layer: Any) -> None:
    """Give the parameter another object, as FP8's."""
    layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("finish", [leaves_alone, renews])
def test_half_suffices_where_its_plan_shows_that_finishing_leaves_the_weight_alone(
    finish: Finish, device: torch.device, imaginary_device: Moved
) -> None:
    rank = Rank(finish=finish, device=device)
    assert "a.weight" in rank.recipe().untouched
    rank.begin(is_partial=True)
    half = {"a.upper": checkpoint(1)["a.upper"]}
    rank.load(half.items())
    if not rank.planned:
        with pytest.raises(Refused, match=r"send together a\.lower, a\.upper"):
            rank.seal()
        return
    rank.seal().make()
    assert rank.is_as(served(0, leaves_alone, half))


def equalizes_unseen(layer: Any) -> None:
    values = layer.weight.data.numpy()
    values /= abs(values).max(axis=1, keepdims=True)


def test_part_is_refused_where_an_unseen_kernel_left_the_weight_alone_by_chance() -> None:
    alike = {name: torch.ones_like(tensor) for name, tensor in checkpoint(0).items()}
    rank = Rank(finish=equalizes_unseen, version=alike)
    rank.begin(is_partial=True)
    rank.load([("a.upper", 2 * alike["a.upper"])])
    with pytest.raises(Refused, match=r"send together a\.lower, a\.upper"):
        rank.seal()


def tabulates_unseen(layer: Any) -> None:
    layer.table.numpy()[:] = layer.weight.data.numpy().sum(axis=0)


def test_table_that_an_unseen_kernel_fills_goes_live() -> None:
    rank = Rank(finish=tabulates_unseen)
    for version in (1, 2):
        rank.update(version).make()
        assert rank.is_as(served(version, tabulates_unseen))


def test_served_weight_of_the_checkpoint_that_nothing_makes_is_unproven() -> None:
    """Neither a commit nor a digest would know of it."""
    live = served(0)
    for is_served in (True, False):
        if not is_served:
            del live.plain.weight
        proof = Proof(Model(), live, CPU, UNPACED, lambda: None)
        for weight in proof._raw_weights.values():
            weight.names.add(weight.name)
        made = tensors_of(live)
        made.pop(Place("plain", "weight"), None)
        proof.take(Made(made))
        if is_served:
            brings = r"brings 'plain\.weight', and finishing does not make it"
            with pytest.raises(Unproven, match=brings):
                proof.recipe(())
        else:
            assert proof.recipe(()).awaited == {"plain"}
