"""A shadow keeps a model's loader away from live tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe.topk import TopKConfig
from sglang.srt.model_loader.utils import should_async_load
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from sglang_inflight.scheduler.update.changes.recording import Budget
from sglang_inflight.scheduler.update.checks.coverage import mark
from sglang_inflight.scheduler.update.checks.dataflow import Dataflow, without_threads
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.reservation import (
    Reservation,
    reserve_storage,
    weights_with_copies,
)
from sglang_inflight.scheduler.update.shadow import Shadow, weights_of
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel
from sglang_inflight.scheduler.update.shadows import Shadows
from sglang_inflight.scheduler.update.swap import ContentSwap, swap_for
from sglang_inflight.scheduler.update.weight import Weight
from sglang_inflight.vocabulary.errors import Refused

pytestmark = pytest.mark.usefixtures("either_way")

CPU = torch.device("cpu")
Weights = Iterable[tuple[str, torch.Tensor]]


class Attention(nn.Module):
    """A module like SGLang's: weights, a table, a scale, and derived tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.weight.weight_loader = self.load_weight  # type: ignore[attr-defined]
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("bias", torch.ones(4))
        self.scale = 1.0
        self.product: torch.Tensor | None = None
        self.products = [torch.zeros(4)]
        self.loaded = 0
        self.mine: Any = None
        self.kept: Any = None

    def load_weight(self, parameter: nn.Parameter, loaded: torch.Tensor) -> None:
        self.loaded += 1
        parameter.data.copy_(loaded)


class Model(nn.Module):
    """A model whose loader calls ``then`` on the attention after loading."""

    def __init__(self, then: Callable[[Attention], object] = lambda attention: None) -> None:
        super().__init__()
        self.attention = Attention()
        self._then = then
        self.cached = dict(self.named_parameters())
        self.parts = (self.attention,)

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            parameter = self.cached[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
        self._then(self.attention)
        self._then(self.parts[0])


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Turn gradients off, like the staging thread."""
    with torch.no_grad():
        yield


def state(model: nn.Module) -> dict[str, Any]:
    """Return copies of all values of the live model within a loader's reach."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for attribute, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{attribute}"] = value.clone()
            elif isinstance(value, float | int):
                found[f"{name}.{attribute}"] = torch.tensor(value)
            elif isinstance(value, list):
                found |= {f"{name}.{attribute}.{i}": v.clone() for i, v in enumerate(value)}
    return found


def stage(model: Model) -> Shadow:
    shadow = Shadow(model, CPU)
    shadow.begin()
    load(shadow, 2.0)
    return shadow


def load(shadow: Shadow, value: float) -> None:
    loader: Any = shadow.model
    with Dataflow(shadow.targets(), before_write=shadow.note_write):
        loader.load_weights([("attention.weight", torch.full((4, 4), value))])


def commit(shadow: Shadow) -> None:
    pairs = tuple((live, own) for _, live, own in (*shadow.pairs, *shadow.derived))
    swap_for(CPU).prepare(pairs)()


def set_scale(attention: Attention) -> None:
    attention.scale = 2.0


def derive(attention: Attention) -> None:
    attention.product = attention.weight @ attention.weight


def derive_in_place(attention: Attention) -> None:
    attention.products[0].copy_(attention.weight[0])


def write_table(attention: Attention) -> None:
    attention.get_buffer("table").data.copy_(attention.weight[0])


def put_new_table(attention: Attention) -> None:
    attention.table = attention.weight[0].clone()


def put_new_weight(attention: Attention) -> None:
    attention.weight = nn.Parameter(attention.weight * 2, requires_grad=False)


IN_PLACE = {"products": derive_in_place, "table": write_table}
REPLACING = {
    "scale": set_scale,
    "product": derive,
    "new table": put_new_table,
    "weight": put_new_weight,
}
DERIVING = {**IN_PLACE, **REPLACING}


@pytest.mark.parametrize("then", DERIVING.values(), ids=DERIVING.keys())
def test_staging_writes_nothing_live(then: Callable[[Attention], None]) -> None:
    model = Model(then)
    if then is derive:
        # SGLang copies in place if there is a product already
        model.attention.product = torch.zeros(4, 4)
    before = state(model)
    stage(model)
    after = state(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("name", "then"), REPLACING.items(), ids=REPLACING.keys())
def test_attribute_replaced_by_loading_is_found(
    name: str, then: Callable[[Attention], None]
) -> None:
    found = stage(Model(then)).find_derived()
    assert found == f"attention.{name.removeprefix('new ')}"


@pytest.mark.parametrize(("name", "then"), IN_PLACE.items(), ids=IN_PLACE.keys())
def test_derived_tensor_is_committed_and_rolled_back(
    name: str, then: Callable[[Attention], None]
) -> None:
    model = Model(then)
    before = state(model)
    shadow = stage(model)
    assert shadow.find_derived() is None
    (derived,) = shadow.derived
    assert derived[0] == f"attention.{name}"
    commit(shadow)
    assert derived[1].tolist() == [2.0] * 4
    commit(shadow)
    after = state(model)
    assert all(torch.equal(before[place], after[place]) for place in before)
    # the next update begins from the served values, even after a rollback or a drop
    shadow.begin()
    assert shadow.derived == []
    assert torch.equal(derived[1], derived[2])
    load(shadow, 3.0)
    commit(shadow)
    assert derived[1].tolist() == [3.0] * 4


def test_derived_tensor_overlapping_a_weight_is_found() -> None:
    """The commit would exchange that memory twice."""
    model = Model(lambda attention: attention.mine.fill_(5.0))
    # reaches beyond the weight's end
    memory = torch.zeros(20)
    model.attention.weight.data = memory[:16].view(4, 4)
    model.attention.mine = memory[14:]
    assert stage(model).find_derived() == "attention.mine"


def test_list_of_weights_shares_shadow_memory() -> None:
    """BailingMoE keeps its experts in such a list, and rebuilds the list at each load."""

    def keep(attention: Attention) -> None:
        attention.kept = {0: [attention.weight.data]}

    model = Model(keep)
    keep(model.attention)
    shadow = stage(model)
    assert shadow.find_derived() is None
    clone: Any = shadow.model.get_submodule("attention")
    assert clone.kept[0][0].data_ptr() == clone.weight.data_ptr()
    commit(shadow)
    assert model.attention.kept[0][0].tolist() == torch.full((4, 4), 2.0).tolist()


def test_write_past_shadow_is_refused_before_writing() -> None:
    live: list[torch.Tensor] = []
    model = Model(lambda attention: live[0].fill_(9.0))
    live.append(model.attention.weight.data)
    with pytest.raises(Refused, match=r"writes 'attention\.weight' where it is being served"):
        stage(model)
    assert model.attention.weight.tolist() == torch.ones(4, 4).tolist()


def test_weight_rebound_by_loader_is_found() -> None:
    def rebind(attention: Attention) -> None:
        attention.weight.data = attention.weight.data.clone()

    assert stage(Model(rebind)).find_derived() == "attention.weight"


def test_model_without_derived_tensors_has_no_findings() -> None:
    shadow = stage(Model())
    assert shadow.find_derived() is None
    (weight, bias) = shadow.pairs
    assert (weight[0], bias[0]) == ("attention.weight", "attention.bias")
    assert weight[2].tolist() == torch.full((4, 4), 2.0).tolist()


def test_unchanged_derived_tensor_is_no_finding() -> None:
    model = Model(lambda attention: setattr(attention, "product", torch.eye(4)))
    model.attention.product = torch.eye(4)
    assert stage(model).find_derived() is None


def test_values_changed_by_serving_are_no_finding() -> None:
    model = Model()
    shadow = stage(model)
    model.attention.scale = 3.0
    model.attention.products[0].fill_(3.0)
    model.attention.product = torch.eye(4)
    assert shadow.find_derived() is None


def test_shared_tensor_stays_shared_in_shadow() -> None:
    model = Model()
    model.attention.mine = model.attention.products[0]
    clone = Shadow(model, CPU).model.get_submodule("attention")
    assert isinstance(clone, Attention)
    assert clone.mine is clone.products[0]


def shadows_of(model: nn.Module, reservation: Reservation | None = None) -> Shadows:
    class Runner:
        class model_config:
            model_path = ""

    runner: Any = Runner()
    runner.model = model
    runner.load_config = SimpleNamespace(load_format="auto")
    reserved = reservation or Reservation(StagingMode.DEVICE)
    models = [ShadowedModel("target", runner)]
    return Shadows(models, reserved.storage_for, UNPACED, Budget(), check_finite=True)


def show_in_an_attribute(attention: Attention) -> Callable[[], torch.Tensor]:
    view = attention.product = attention.weight.view(16)
    return lambda: view


def show_in_an_object(attention: Attention) -> Callable[[], torch.Tensor]:
    """A router holds a row of another module's weight."""
    topk: Any = TopKConfig(top_k=1, correction_bias=attention.weight[0])
    attention.topk_config = topk
    return lambda: topk.correction_bias


def show_in_a_closure(attention: Attention) -> Callable[[], torch.Tensor]:
    row = attention.weight[0]
    attention.forward = lambda: row
    return lambda: row


@pytest.mark.parametrize("show", [show_in_an_attribute, show_in_an_object, show_in_a_closure])
def test_weight_with_a_view_is_swapped_by_contents(
    show: Callable[[Attention], Callable[[], torch.Tensor]],
) -> None:
    """After a swap of pointers the view would show the old memory."""
    model = Model()
    shown = show(model.attention)
    shadows = shadows_of(model)
    shadows.build(StagingMode.DEVICE, CPU)
    weight, shadow = model.attention.weight, torch.full((4, 4), 2.0)
    swap_for(CPU).prepare(((weight, shadow),))()
    assert (set(weight.flatten().tolist()), set(shadow.flatten().tolist())) == ({2}, {1})
    assert set(shown().flatten().tolist()) == {2}
    # the next update begins
    mark(shadow)
    assert set(shown().flatten().tolist()) == {2}


def test_weight_without_views_is_swapped_by_pointer() -> None:
    model = Model()
    shadows = shadows_of(model)
    shadows.build(StagingMode.DEVICE, CPU)
    for attempt in range(2):
        for live in (model.attention.weight, model.attention.get_buffer("bias")):
            shadow = torch.full(live.shape, 2.0 - attempt)
            pointers = live.data_ptr(), shadow.data_ptr()
            swap_for(CPU).prepare(((live, shadow),))()
            assert (shadow.data_ptr(), live.data_ptr()) == pointers


@pytest.mark.parametrize("cut", [lambda w: w.view(16), lambda w: w[1:3]], ids=["whole", "rows"])
def test_weights_that_share_memory_are_refused_by_name(
    cut: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A commit would exchange the memory twice, and the second time back."""
    model = Model()
    model.attention.other = nn.Parameter(cut(model.attention.weight.data), requires_grad=False)
    shadows = shadows_of(model)
    names = r"'attention\.(weight|other)' and 'attention\.(weight|other)' share memory"
    with pytest.raises(Refused, match=names):
        shadows.build(StagingMode.DEVICE, CPU)
    shadows.build(StagingMode.OFF, CPU)


def test_weights_that_lie_side_by_side_in_one_memory_have_a_shadow() -> None:
    model = Model()
    both = torch.ones(8, 4)
    model.attention.weight.data = both[:4]
    model.attention.other = nn.Parameter(both[4:], requires_grad=False)
    shadows_of(model).build(StagingMode.DEVICE, CPU)


def test_content_swap_raises_tensor_version() -> None:
    live, shadow = torch.ones(3), torch.zeros(3)
    version = live._version
    ContentSwap(CPU, 64).swap(live, shadow)
    assert live._version > version


def test_failed_shadow_build_leaves_no_part() -> None:
    model, is_full = Model(), True
    made: list[torch.Tensor] = []

    class Full(Reservation):
        def storage_for(self, original: torch.Tensor, device: torch.device) -> torch.Tensor:
            if is_full and len(made) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16 GiB\nmore")
            made.append(super().storage_for(original, device))
            return made[-1]

    built = shadows_of(model, Full(StagingMode.DEVICE))
    with pytest.raises(Refused, match=r"building it failed: CUDA out of memory.* 16 GiB$"):
        built.build(StagingMode.DEVICE, CPU)
    assert [tensor.numel() for tensor in made] == [0]
    assert model.attention.weight.tolist() == torch.ones(4, 4).tolist()
    is_full = False
    built.build(StagingMode.DEVICE, CPU)
    assert [tensor.numel() for tensor in made] == [0, 16, 4]


def test_reserved_memory_of_replaced_tensor_is_freed() -> None:
    """A target's embeddings replace a draft's own after the reservation."""
    model = Model()
    storage = reserve_storage(weights_with_copies([model]), CPU)
    assert storage is not None
    replaced = weakref.ref(model.attention.weight)
    model.attention.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    model.cached = dict(model.named_parameters())
    Reservation(StagingMode.DEVICE, storage).keep_for(weights_with_copies([model]))
    assert replaced() is None
    assert len(storage) == 1


def test_forgotten_shadow_empties_torch_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would keep the freed memory in its caches, on the device and on the host."""
    given: list[str] = []
    module = SimpleNamespace(empty_cache=lambda: given.append("device's"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: given.append("host's"))
    shadows_of(Model()).forget(torch.device("cuda"))
    assert given == ["device's", "host's"]


def test_whole_copies_use_reserved_memory() -> None:
    model = Model()
    storage = reserve_storage(weights_with_copies([model, model]), CPU)
    assert storage is not None
    kept = {id(k.original): k.storage.data_ptr() for k in storage.values()}
    assert len(kept) == 2
    # registered after the reservation: gets memory of its own
    model.attention.register_buffer("late", torch.ones(2))
    shadows = shadows_of(model, Reservation(StagingMode.DEVICE, storage))
    shadows.build(StagingMode.DEVICE, CPU)
    form: Any = shadows.form._form
    for name, live in weights_of(model):
        copy = form._copy_of(Weight(name, live))
        assert (copy.data_ptr() == kept.get(id(live))) is not name.endswith("late")
    assert storage == {}


def test_partial_reservation_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    allocate, calls, emptied = torch.empty_like, iter(range(9)), []

    def full(*args: Any, **kwargs: Any) -> torch.Tensor:
        if next(calls):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(*args, **kwargs)

    class Module:
        @staticmethod
        def empty_cache() -> None:
            emptied.append(True)

    monkeypatch.setattr(torch, "empty_like", full)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert reserve_storage(weights_with_copies([model]), CPU) is None
    assert emptied == [True]


def test_loader_uses_no_threads_while_staging() -> None:
    """SGLang's own check, on the tensors passed to its loaders."""
    assert should_async_load(torch.ones(1))
    _, tensor = without_threads("a", torch.ones(1))
    assert not should_async_load(tensor)
