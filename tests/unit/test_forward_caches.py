"""Products that forwards keep are found, and made anew after a commit; workspaces stay."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.layernorm import GemmaRMSNorm
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.gemma4_causal import Gemma4Router
from torch import nn

from sglang_inflight.scheduler.forward_caches import caches as forward_caches
from sglang_inflight.scheduler.forward_caches.caches import MOST_FORWARDS, ForwardCaches
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.swap import PreparedSwap, swap_for
from sglang_inflight.vocabulary.labels import VersionLabel
from tests.support.calls import calls_of

CPU = torch.device("cpu")


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float32), requires_grad=False)


class Layer(nn.Module):
    """A layer with two weights, and a forward of a test's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = parameter(1, 2), parameter(3, 4)
        self.product: torch.Tensor | None = None
        self.is_made = False
        self.cache: dict[Any, Any] = {}
        self.table = torch.ones(2)
        self.quant_method = SimpleNamespace(packed=None)
        self.made: torch.Tensor
        self.register_buffer("made", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class MarksProduct(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_made:
            self.product, self.is_made = self.a * self.b, True
        assert self.product is not None
        return self.product * x


class StacksIntoDict(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in self.cache:
            self.cache[x.dtype] = torch.stack([self.a, self.b]).to(x.dtype)
        stacked: torch.Tensor = self.cache[x.dtype]
        return stacked.prod(dim=0) * x


class SetsAttribute(Layer):
    """An attribute that loading does not know, as of a helper function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "lazy"):
            self.lazy = torch.empty(2)
            self.lazy.copy_(self.a.double() * self.b)
        return self.lazy * x


class FillsBuffer(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.made is None:
            self.made = self.a * self.b
        return self.made * x


class PacksInMethod(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.quant_method.packed is None:
            self.quant_method.packed = (self.a * self.b,)
        packed: torch.Tensor = self.quant_method.packed[0]
        return packed * x


class MakesModule(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.linear is None:
            self.linear = nn.Bilinear(1, 1, 1)
            self.linear.weight.data = self.a * self.b
            self.is_made = True
        weight: torch.Tensor = self.linear.weight.data
        return weight * x


class MakesParameter(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.product is None:
            self.product = nn.Parameter(self.a * self.b, requires_grad=False)
        return self.product.data * x


class ReadsNumber(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "largest"):
            self.largest = [float(v) for v in (self.a * self.b)]
            self.scale = float((self.a * self.b).max())
        return self.a * self.b * x * (self.scale / self.scale)


REMADE = [
    MarksProduct,
    StacksIntoDict,
    SetsAttribute,
    FillsBuffer,
    PacksInMethod,
    MakesModule,
    MakesParameter,
]


class Runner:
    """A runner without a server: its forwards are the model's."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.forward_pass_id = 0

    def forward(self, forward_batch: Any) -> torch.Tensor:
        self.forward_pass_id += 1
        output: torch.Tensor = self.model(forward_batch.input)
        return output

    def run(self, *values: float, mode: ForwardMode = ForwardMode.EXTEND) -> list[float]:
        batch = SimpleNamespace(forward_mode=mode, input=torch.tensor(values, dtype=torch.float32))
        return self.forward(batch).tolist()

    @property
    def is_watched(self) -> bool:
        return "forward" in vars(self)


class Rank:
    """The live weights of one model, and what its forwards make."""

    def __init__(self, model: nn.Module, *, holds_graphs: bool = False) -> None:
        self.model = model
        self.runner = Runner(model)
        of_sglang: Any = self.runner
        self.caches = ForwardCaches(model)
        if holds_graphs:
            # the capture's own forward
            model(torch.ones(2))
        self.caches.end_start(of_sglang, holds_graphs=holds_graphs)
        scheduler: Any = SimpleNamespace(device="cpu")
        self.live = LiveWeights(scheduler)
        self.live.attach({"target": self.caches}, free=PreparedSwap.free)

    def commit(self, swap: PreparedSwap) -> None:
        self.live.swap_in("digest", swap, base=VersionLabel(0, "v"))

    def swap_of(self, **weights: torch.Tensor) -> PreparedSwap:
        parameters = dict(self.model.named_parameters())
        pairs = tuple((parameters[name], weight) for name, weight in weights.items())
        return PreparedSwap(swap_for(CPU), pairs)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("kind", REMADE)
def test_first_forward_after_a_swap_has_no_product_of_older_weights(kind: type[Layer]) -> None:
    rank = Rank(kind())
    run = rank.runner.run
    assert run(1, 1) == [3, 8]
    swap = rank.swap_of(a=torch.tensor([5.0, 6.0]))
    rank.commit(swap)
    assert run(1, 1, mode=ForwardMode.DECODE) == [15, 24]
    # a rollback, and another one
    rank.commit(swap)
    assert run(1, 1) == [3, 8]
    rank.commit(swap)
    assert run(1, 1) == [15, 24]
    assert rank.caches.why_not_updated() is None


@pytest.mark.parametrize("kind", REMADE)
def test_product_made_between_seal_and_commit_is_not_kept(kind: type[Layer]) -> None:
    """No search comes between that forward and the commit, and nobody watched the forward."""
    rank = Rank(kind())
    del vars(rank.runner)["forward"]
    assert rank.caches.why_not_updated() is None
    assert rank.runner.run(1, 1) == [3, 8]
    rank.commit(rank.swap_of(a=torch.tensor([5.0, 6.0])))
    assert rank.runner.run(1, 1) == [15, 24]


def test_reset_and_exchange_leave_no_moment_between_them() -> None:
    """The reset needs no step and no search: the commit's own call makes both."""
    rank = Rank(MarksProduct())
    rank.runner.run(1, 1)
    rank.commit(rank.swap_of(a=torch.tensor([5.0, 6.0])))
    layer: Any = rank.model
    assert (layer.a.tolist(), layer.product, layer.is_made) == ([5, 6], None, False)
    # searches, also of a later update, bring nothing back
    rank.caches.find()
    assert (layer.product, layer.is_made) == (None, False)


def test_weights_written_past_an_update_outdate_the_product() -> None:
    rank = Rank(MarksProduct())
    rank.runner.run(1, 1)
    rank.model.get_parameter("a").fill_(5.0)
    rank.live.lose_name()
    assert rank.runner.run(1, 1) == [15, 20]


@pytest.mark.parametrize("kind", REMADE)
def test_product_held_by_graphs_refuses_updates_by_name(kind: type[Layer]) -> None:
    rank = Rank(nn.Sequential(kind()), holds_graphs=True)
    assert not rank.runner.is_watched
    reason = rank.caches.why_not_updated() or ""
    assert f"of 0 ({kind.__name__})" in reason or f"of 0.quant_method ({kind.__name__})" in reason
    assert "captured CUDA graphs" in reason


def test_product_made_after_the_capture_is_remade() -> None:
    rank = Rank(LateProduct(), holds_graphs=True)
    assert rank.caches.why_not_updated() is None
    assert rank.runner.run(2, 2) == [6, 16]
    assert rank.caches.why_not_updated() is None
    rank.commit(rank.swap_of(a=torch.tensor([5.0, 6.0])))
    assert rank.runner.run(2, 2) == [30, 48]


class LateProduct(Layer):
    """Makes its product for images only, and the capture has none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x == 1).all()):
            return self.a * self.b
        if self.product is None:
            self.product = self.a * self.b
        return self.product * x


class Workspaces(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.ticks = torch.zeros(1, dtype=torch.int64)
        self.shown = self.table[:1]
        self.last = torch.zeros(2)
        self.scratch = torch.zeros(2)
        self.kept: torch.Tensor | None = None
        self.indices: torch.Tensor | None = None
        self.angles: torch.Tensor | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.steps.add_(1)
        self.ticks += 1
        self.shown = self.table[:2]
        self.scratch.copy_(x * self.a)
        self.kept = self.last = self.scratch + x
        if self.indices is None:
            self.indices, self.angles = torch.arange(2), torch.arange(2).cos()
        return self.kept


@pytest.mark.parametrize("holds_graphs", [False, True])
def test_workspaces_stay(holds_graphs: bool) -> None:
    rank = Rank(OnlyIndices() if holds_graphs else Workspaces(), holds_graphs=holds_graphs)
    rank.runner.run(1, 1)
    rank.runner.run(2, 2, mode=ForwardMode.DECODE)
    assert rank.caches.why_not_updated() is None
    layer: Any = rank.model
    kept = {name: value for name, value in vars(layer).items() if name != "_parameters"}
    rank.commit(rank.swap_of(a=torch.tensor([5.0, 6.0])))
    assert all(vars(layer)[name] is value for name, value in kept.items())


class OnlyIndices(Layer):
    """Unwatched, a tensor of integers is no copy of weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.indices = torch.arange(2)
        return x * self.a


class Replaces(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.a.double()
        return x * self.table


class Overwrites(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table.copy_(self.a)
        return x * self.table


@pytest.mark.parametrize("holds_graphs", [False, True])
@pytest.mark.parametrize("kind", [Replaces, Overwrites])
def test_table_changed_by_weights_refuses_updates_by_name(
    kind: type[Layer], holds_graphs: bool
) -> None:
    rank = Rank(kind(), holds_graphs=holds_graphs)
    rank.runner.run(1, 1)
    assert f"'table' of the model ({kind.__name__})" in (rank.caches.why_not_updated() or "")


class RefersToLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MarksProduct()
        self.in_order = [self.inner]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.in_order[0](x)
        return output


def test_list_of_modules_is_no_tensor_of_its_own() -> None:
    rank = Rank(RefersToLayers())
    rank.runner.run(1, 1)
    assert rank.caches.why_not_updated() is None


class Normalizes(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_made:
            self.a.data.mul_(self.b)
            self.is_made = True
        return self.a * x


def test_weight_changed_by_a_forward_refuses_updates_by_name() -> None:
    rank = Rank(Normalizes())
    rank.runner.run(1, 1)
    assert "overwrites the weight 'a'" in (rank.caches.why_not_updated() or "")


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.table.to(torch.float64)
        return x


@pytest.mark.parametrize("holds_graphs", [False, True])
def test_table_converted_in_a_module_without_weights_stays(holds_graphs: bool) -> None:
    rank = Rank(nn.Sequential(Rotary()), holds_graphs=holds_graphs)
    rank.runner.run(1, 1)
    assert rank.caches.why_not_updated() is None


def test_number_read_from_weights_is_read_anew() -> None:
    rank = Rank(ReadsNumber())
    rank.runner.run(1, 1)
    layer: Any = rank.model
    assert layer.scale == 8
    rank.commit(rank.swap_of(a=torch.tensor([5.0, 6.0])))
    assert not hasattr(layer, "scale")


def test_unfused_router_refuses_updates_and_a_fused_one_does_not() -> None:
    """Gemma 4's router overwrites its norm at the first forward, unless it was fused before."""
    config = SimpleNamespace(hidden_size=2, rms_norm_eps=1e-6, num_experts=2)
    for is_fused in (False, True):
        router = Gemma4Router(config)
        router.get_parameter("proj.weight").fill_(1.0)
        if is_fused:
            router.fuse_scale()
        rank = Rank(router)
        rank.runner.forward(batch_of(torch.ones(1, 2)))
        assert (rank.caches.why_not_updated() is None) is is_fused


def test_gemmas_norm_is_no_forward_cache() -> None:
    norm = GemmaRMSNorm(2)
    rank = Rank(norm)
    rank.runner.forward(batch_of(torch.ones(1, 2)))
    assert rank.caches.why_not_updated() is None


class CompilesPart(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.compile(torch.mul, fullgraph=True, backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.part(self.a, x)
        return scaled


def test_watch_leaves_compiled_parts_compiled() -> None:
    """Under another mode torch would refuse to run a part that must be one graph."""
    rank = Rank(CompilesPart())
    assert rank.runner.run(1, 1) == [1, 2]
    assert rank.caches.why_not_updated() is None


def batch_of(rows: torch.Tensor) -> Any:
    return SimpleNamespace(forward_mode=ForwardMode.EXTEND, input=rows)


def test_watch_ends_after_a_prefill_and_a_decode() -> None:
    rank = Rank(MarksProduct())
    assert rank.runner.is_watched
    rank.runner.run(1, 1)
    rank.runner.run(1, 1)
    assert rank.runner.is_watched
    rank.runner.run(1, 1, mode=ForwardMode.DECODE)
    assert not rank.runner.is_watched
    waits = Rank(MarksProduct())
    for _ in range(MOST_FORWARDS):
        waits.runner.run(1, 1)
    assert not waits.runner.is_watched


def test_failure_of_the_watch_reaches_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the watch, a new floating tensor counts as made of weights."""
    rank = Rank(MarksProduct())

    def fail(*args: object) -> None:
        raise RuntimeError("no operation can be followed")

    monkeypatch.setattr("sglang_inflight.scheduler.forward_caches.provenance.memory_key", fail)
    assert rank.runner.run(1, 1) == [3, 8]
    assert not rank.runner.is_watched
    monkeypatch.undo()
    rank.commit(rank.swap_of(a=torch.tensor([5.0, 6.0])))
    assert rank.runner.run(1, 1) == [15, 24]


def test_loading_in_place_makes_no_tensor_of_forwards() -> None:
    """SGLang's finishing replaces tables, and no forward does."""
    rank = Rank(MarksProduct())
    rank.runner.run(1, 1)
    layer: Any = rank.model
    layer.table = layer.a * 2
    rank.caches.note_loaded()
    assert rank.caches.why_not_updated() is None
    rank.commit(PreparedSwap())
    assert layer.product is None


class Many(nn.Module):
    """A model of many layers, of which the first makes a product."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = SetsAttribute()
        self.rest = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.first(x)
        return output


def test_reset_takes_as_many_calls_for_any_number_of_modules() -> None:
    """The loop waits for it, twice for each step of a pinned request."""
    calls = []
    for layers in 1, 100:
        rank = Rank(Many(layers))
        rank.runner.run(1, 1)
        assert rank.caches.why_not_updated() is None
        rank.caches.reset()
        without_forward = calls_of(rank.caches.reset)
        rank.runner.run(1, 1)
        calls.append((without_forward, calls_of(rank.caches.reset)))
        assert not hasattr(rank.model.first, "lazy")
    assert calls[0] == calls[1]


def test_attribute_set_where_the_search_has_been_is_found_at_the_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The staging thread searches while forwards run, and lets them run between two modules."""
    first: Any = MarksProduct()
    rank = Rank(nn.Sequential(first, Layer()))
    del vars(rank.runner)["forward"]
    places = []

    def yield_gil() -> None:
        places.append(True)
        if len(places) == 2:
            # the search has left the first layer
            first(torch.ones(2))

    monkeypatch.setattr(forward_caches, "yield_gil", yield_gil)
    assert rank.caches.why_not_updated() is None
    assert first.is_made
    rank.caches.reset()
    assert (first.product, first.is_made) == (None, False)


def test_attribute_beside_a_reset_one_is_found() -> None:
    """A commit unsets one attribute, and the next forward sets another one of the module."""

    class SetsOneOfTwo(SetsAttribute):
        name = "lazy"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            setattr(self, self.name, self.a * self.b)
            made: torch.Tensor = getattr(self, self.name)
            return made * x

    layer = SetsOneOfTwo()
    rank = Rank(layer)
    del vars(rank.runner)["forward"]
    rank.runner.run(1, 1)
    rank.caches.reset()
    SetsOneOfTwo.name = "other"
    rank.runner.run(1, 1)
    rank.caches.reset()
    assert not hasattr(layer, "lazy")
    assert not hasattr(layer, "other")


class Kept:
    """Ways in which a forward keeps its product where nothing was."""

    @staticmethod
    def attribute(layer: Any, product: torch.Tensor) -> None:
        layer.other = product

    @staticmethod
    def unset(layer: Any, product: torch.Tensor) -> None:
        layer.product = product

    @staticmethod
    def container(layer: Any, product: torch.Tensor) -> None:
        layer.cache["product"] = product

    @staticmethod
    def constant(layer: Any, product: torch.Tensor) -> None:
        layer.table = product

    @staticmethod
    def buffer(layer: Any, product: torch.Tensor) -> None:
        layer.made = product

    @staticmethod
    def method(layer: Any, product: torch.Tensor) -> None:
        layer.quant_method.packed = [product]

    @staticmethod
    def record(layer: Any, product: torch.Tensor) -> None:
        layer.record.made = product

    @staticmethod
    def list_of_numbers(layer: Any, product: torch.Tensor) -> None:
        layer.numbers.append(product)


WAYS = [name for name in vars(Kept) if not name.startswith("_")]


@dataclasses.dataclass
class Record:
    made: Any = None


class Keeps(Layer):
    """A layer whose forward keeps a product once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.keep: Any = None
        self.record = Record()
        self.numbers: list[Any] = [1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.keep is not None:
            self.keep(self, self.a * self.b)
        return self.a * self.b * x


def searched(layer: nn.Module) -> Rank:
    """Return the rank of a model that a search has looked at, and whose forwards nobody watches."""
    rank = Rank(layer)
    del vars(rank.runner)["forward"]
    assert rank.caches.why_not_updated() is None
    return rank


@pytest.mark.parametrize("way", WAYS)
def test_product_is_found_after_a_search_that_has_found_nothing(way: str) -> None:
    layer = Keeps()
    rank = searched(nn.Sequential(Layer(), layer))
    assert rank.caches.why_not_updated() is None
    layer.keep = getattr(Kept, way)
    layer(torch.ones(2))
    why_not = rank.caches.why_not_updated()
    assert why_not is not None or rank.caches._resets, way


def test_search_looks_at_nothing_that_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has some ten thousand attributes."""
    layer = MarksProduct()
    rank = searched(nn.Sequential(layer, nn.Identity()))
    rank.runner.run(1, 1)
    # what the forward made is found, and what the reset unsets is known
    assert rank.caches.why_not_updated() is None
    rank.caches.reset()
    rank.runner.run(1, 1)
    monkeypatch.setattr(rank.caches, "_find_everywhere", None)
    assert rank.caches.why_not_updated() is None
    rank.caches.reset()
    assert layer.product is None


def test_search_holds_no_tensor_that_a_forward_has_replaced() -> None:
    layer = Keeps()
    rank = searched(layer)
    held = []
    for _ in range(3):
        Kept.unset(layer, layer.a * layer.b)
        held.append(weakref.ref(layer.product))
        assert rank.caches.why_not_updated() is None
    gc.collect()
    assert [tensor() is not None for tensor in held] == [False, False, True]
