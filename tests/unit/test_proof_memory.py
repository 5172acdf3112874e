"""Finishing counts the memory that it takes, and the proof gives it back."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import nn

from sglang_inflight.scheduler.update.changes.handles import Handle
from sglang_inflight.scheduler.update.checks.dataflow import Dataflow
from sglang_inflight.scheduler.update.finished import raw_model
from sglang_inflight.scheduler.update.finished.places import Place, tensors_of
from sglang_inflight.scheduler.update.finished.proof import NotNow, find_recipe
from sglang_inflight.scheduler.update.finished.raw_model import RawModel
from sglang_inflight.scheduler.update.finished.recipe import Recipe
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import Refused
from tests.unit.finishing import Finish, Finishing

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LAYERS = 3
# bytes of one layer's weight
NBYTES = 48
WEIGHTS = {f"layers.{n}.weight": torch.rand(4, 3) for n in range(LAYERS)}


class Layer(nn.Module):
    def __init__(self, finish: Finish) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3), requires_grad=False)
        self.quant_method = Finishing(finish)


class Model(nn.Module):
    def __init__(self, finish: Finish) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(finish) for _ in range(LAYERS))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


class Finished:
    """Replaces weights, and counts the replacements that somebody holds."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def __call__(self, layer: Any) -> None:
        new = nn.Parameter(layer.weight.data.t().contiguous(), False)
        layer.weight = new
        self._made.append(weakref.ref(new))
        del new
        gc.collect()
        self.most = max(self.most, sum(made() is not None for made in self._made))


def find(finish: Finish, host_bytes: int, device: torch.device = CPU) -> None:
    live = Model(Finished())
    live.load_weights(WEIGHTS.items())
    for layer in live.layers:
        Finished()(layer)
    loaded = {memory_key(tensor) for tensor in tensors_of(live).values()}
    find_recipe(Model(finish), live, device, WEIGHTS.items(), UNPACED, host_bytes, loaded)


def test_results_of_one_module_alone_take_memory() -> None:
    finished = Finished()
    find(finished, 1 << 30)
    assert finished.most == 1


def test_memory_of_raw_weights_and_of_one_result_is_counted() -> None:
    find(Finished(), (LAYERS + 1) * NBYTES)
    with pytest.raises(NotNow, match="MiB are free for this rank"):
        find(Finished(), (LAYERS + 1) * NBYTES - 1)


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a proof run as on a device, and return the calls of ``empty_host_cache``."""
    given: list[str] = []
    monkeypatch.setattr(
        raw_model, "device_loading_context", lambda module, device: contextlib.nullcontext()
    )
    monkeypatch.setattr(
        DefaultModelLoader,
        "load_weights_only",
        staticmethod(lambda model, weights, device: model.load_weights(weights)),
    )
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: given.append("host's"))
    return given


def test_pinned_memory_is_counted_as_torch_rounds_it_and_given_back(on_a_device: list[str]) -> None:
    pinned = 64
    most = (LAYERS + 1) * NBYTES + pinned
    find(Finished(), most, CUDA)
    assert on_a_device == ["host's"]
    with pytest.raises(NotNow):
        find(Finished(), most - 1, CUDA)


@pytest.mark.parametrize("is_watched", [True, False])
def test_memory_whose_pages_nobody_asks_for_may_have_huge_ones(is_watched: bool) -> None:
    """A checkpoint of 84 GB a rank takes 20 million faults in pages of 4 KiB."""
    handle = Handle(torch.empty(1 << 20), is_watched=is_watched)
    address = handle.tensor.data_ptr()
    flags: list[str] = []
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        begin, dash, end = first.partition("-")
        if dash:
            is_here = int(begin, 16) <= address < int(end, 16)
        elif is_here and first == "VmFlags:":
            flags = rest.split()
    # no huge pages, or huge ones also where the system gives them only on request
    assert ("nh" if is_watched else "hg") in flags


def test_raw_weights_may_have_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def handle(like: torch.Tensor, *, is_watched: bool = True) -> Handle:
        asked.append(is_watched)
        return Handle(like, is_watched=is_watched)

    monkeypatch.setattr(raw_model, "Handle", handle)
    find(Finished(), 1 << 30)
    assert asked == [False] * LAYERS


class WithProduct(nn.Module):
    """Computes a product of a weight after loading, as MLA does."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.gone = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
        self.product: torch.Tensor | None = None

    def post_load_weights(self) -> None:
        self.product = self.plain.weight.data * 2


class Forgetting(RawModel):
    def take(self, made: raw_model.Made) -> None:
        """Use nothing."""


def finish_on_a_device(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Load and finish an update on a device with ``free`` bytes."""
    recipe = Recipe(
        names={f"{name}.weight": frozenset({f"{name}.weight"}) for name in ("plain", "gone")},
        untouched=frozenset({"plain.weight"}),
        tensors=frozenset({Place("plain", "weight"), Place("", "product")}),
        numbers=frozenset(),
        # finishing deletes the weight of ``gone``, and needs no other module for that
        awaited=frozenset({"plain", "gone"}),
    )
    live = WithProduct()
    live.post_load_weights()
    monkeypatch.setattr(raw_model, "_free_bytes", lambda device: free)
    monkeypatch.setattr(raw_model, "_OnDevice", lambda parameters, where: parameters)
    raw = Forgetting(WithProduct(), live, CUDA, UNPACED, recipe)
    with torch.no_grad():
        raw.begin(None, is_partial=False)
        dataflow = Dataflow(raw.targets(), before_write=raw.note_write)
        model: Any = raw.model
        with dataflow:
            sent = [(f"{name}.weight", torch.rand(4, 3)) for name in ("plain", "gone")]
            for name, tensor in dataflow.receive_each(sent):
                model.get_parameter(name).data.copy_(tensor)
        raw.finish()


def test_update_is_refused_where_finishing_it_would_fill_the_device(
    on_a_device: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight_and_product = 2 * NBYTES
    finish_on_a_device(monkeypatch, weight_and_product)
    with pytest.raises(Refused, match=r"MiB are free: a smaller --mem-fraction-static"):
        finish_on_a_device(monkeypatch, weight_and_product - 1)
