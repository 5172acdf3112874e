"""Faults of updates on a device that no CPU shows, on the glass card."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attn_residual import get_cw
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from harness.glass.platform import exchange_by_card
from sglang_inflight.scheduler.captures import capture_beside_other_threads
from sglang_inflight.scheduler.update.changes.recording import Recording
from sglang_inflight.scheduler.update.checks.dataflow import Dataflow
from sglang_inflight.scheduler.update.finished.finished_model import FinishedModel
from sglang_inflight.scheduler.update.finished.places import tensors_of
from sglang_inflight.scheduler.update.finished.proof import find_recipe
from sglang_inflight.scheduler.update.finished.recipe import Recipe
from sglang_inflight.scheduler.update.forms import Changes, Form, WholeCopies
from sglang_inflight.scheduler.update.live_machine import Open
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.swap import SPARE_BYTES, PreparedSwap, swap_for
from sglang_inflight.scheduler.update.worker import StagingWorker, streams_of
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import Refused, Unproven
from tests.glass.card import on_card
from tests.glass.card_rank import (
    COLUMNS,
    GLASS,
    ON_HOST,
    ROWS,
    UNLIMITED,
    CardRank,
    Model,
    glass,
    on_device,
    version,
)
from tests.unit.finishing import Finishing


def offload(model: nn.Module, name: str) -> None:
    """Keep a weight in pinned memory like SGLang's ``OffloaderV1``."""
    model._parameters[name] = nn.Parameter(torch.zeros(ROWS, COLUMNS).pin_memory(), False)


@on_card()
def test_pinned_changes_outlive_the_exchanges_that_use_them() -> None:
    rank = CardRank(on_device(Model()), budget=ON_HOST)
    new = version(1)
    rank.commit(rank.stage(new))
    glass.synchronize()
    assert rank.live.previous is not None
    # two exchanges around a forward of a pinned request, which takes a while
    with rank.live.previous_in_place(rank.live.previous):
        release = glass.hold(rank.forward_stream)
        rank.run()
    # an update opens meanwhile, and forgets what the last one recorded
    rank.live.move(Open(partial=False))
    rank.rank._jobs._shadows.form.begin()
    # a step copies results to the host
    results = [torch.full((ROWS, COLUMNS), 7.0).pin_memory() for _ in range(4)]
    release()
    glass.synchronize()
    assert len(results) == 4
    assert torch.equal(rank.model.weight.cpu(), new["weight"])
    assert torch.equal(rank.model.other.cpu(), new["other"])


@on_card()
def test_changes_cut_by_a_later_tensor_stay_readable_for_the_device() -> None:
    rank = CardRank(on_device(Model()), budget=ON_HOST)
    first, upper = version(1), torch.randn(ROWS // 2, COLUMNS)
    rank.commit(rank.stage(first, {"upper": upper}, partial=True))
    glass.synchronize()
    expected = torch.cat([upper, first["weight"][ROWS // 2 :]])
    assert torch.equal(rank.model.weight.cpu(), expected)


@pytest.mark.parametrize("mode", ["CHANGES", "HOST", "DEVICE"])
@pytest.mark.parametrize("name", ["weight", "other"])
@on_card()
def test_weight_on_the_host_is_refused_before_the_vote(name: str, mode: str) -> None:
    model = on_device(Model())
    offload(model, name)
    rank = CardRank(model, StagingMode[mode])
    with pytest.raises((Refused, Unproven), match="is kept on the host"):
        rank.stage(version(1))
    glass.synchronize()


def quantize(layer: Any) -> None:
    """Replace a weight by its transpose and a scale, as kernels ask."""
    scale = layer.weight.data.abs().amax(dim=1)
    layer.weight = nn.Parameter((layer.weight.data / scale[:, None]).t().contiguous(), False)
    layer.scale = scale


class Layer(nn.Module):
    def __init__(self, *, is_quantized: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ROWS, COLUMNS), requires_grad=False)
        if is_quantized:
            self.quant_method = Finishing(quantize)


class Latent(nn.Module):
    """A model with multi-head latent attention.

    ``product`` is made of ``kv_b`` after loading. Prompts are multiplied by ``kv_b`` itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kv_b, self.a = Layer(), Layer(is_quantized=True)
        self.others = nn.ModuleList(Layer() for _ in range(OTHERS))
        self.product: torch.Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters: dict[str, Any] = dict(self.named_parameters())
        for name, tensor in weights:
            default_weight_loader(parameters[name], tensor)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.product = (self.kv_b.weight * 3).t()


OTHERS = 64


def latent_version(number: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(number)
    names = ("kv_b", "a", *(f"others.{at}" for at in range(OTHERS)))
    return {f"{name}.weight": torch.randn(ROWS, COLUMNS) for name in names}


def latent_model(number: int) -> Any:
    """Return the model as SGLang serves it: loaded and finished on the device."""
    model = Latent()
    on_device(model)
    with torch.no_grad():
        model.load_weights(latent_version(number).items())
        model.a.quant_method.process_weights_after_loading(model.a)
    return model


def on_card_alike(weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(weight.data, device=GLASS)


class LatentRank:
    """A model that SGLang finishes after loading, with its staging on the card."""

    def __init__(self, form: str) -> None:
        exchange_by_card()
        self.live = latent_model(0)
        swap = swap_for(GLASS)
        self.form: Form
        if form == "changes":
            self.form = Changes(Recording(UNLIMITED, UNPACED), swap, UNPACED)
        else:
            self.form = WholeCopies(StagingMode.DEVICE, swap, UNPACED, on_card_alike)
        self.shadow = FinishedModel(
            Latent(),
            self.live,
            prove(self.live),
            self.form,
            device=GLASS,
            rate_limit=UNPACED,
            holds_graphs=False,
            owners=(),
            check_finite=True,
        )

    def update(self, number: int) -> None:
        """Stage and commit a whole update."""
        self.form.begin()
        self.shadow.begin(None, is_partial=False)
        self.shadow.restore()
        for weight in self.shadow.weights:
            self.form.expect(weight, keeps=True)
        dataflow = Dataflow(
            self.shadow.targets(),
            before_write=self.shadow.note_write,
            recorder=self.shadow.recorder,
        )
        model: Any = self.shadow.model
        with torch.no_grad():
            with dataflow:
                model.load_weights(dataflow.receive_each(latent_version(number).items()))
                self.shadow.finish_complete()
            self.shadow.seal(was_loaded=True)
        self.form.prepare([*self.shadow.weights], self.shadow.numbers).make()


def prove(live: nn.Module) -> Recipe:
    """Find out how finishing makes ``live``, which serves version 0."""
    loaded = {memory_key(tensor) for tensor in tensors_of(live).values()}
    weights = latent_version(0).items()
    return find_recipe(Latent(), live, GLASS, weights, UNPACED, 1 << 30, loaded)


@pytest.mark.parametrize("form", ["changes", "device"])
@on_card()
def test_weights_read_on_the_device_after_loading_are_updated(form: str) -> None:
    rank = LatentRank(form)
    for number in (1, 2):
        rank.update(number)
        expected = latent_model(number)
        assert torch.equal(rank.live.kv_b.weight, expected.kv_b.weight)
        assert torch.equal(rank.live.product, expected.product)
        assert torch.equal(rank.live.a.weight, expected.a.weight)


@on_card()
def test_proof_keeps_the_checkpoint_off_the_device() -> None:
    live = latent_model(0)
    glass.synchronize()
    before = glass.memory_allocated()
    glass.reset_peak_memory_stats()
    prove(live)
    weights = sum(weight.nbytes for weight in live.parameters())
    # ``kv_b``, its product, and one module
    assert glass.max_memory_allocated() - before < weights / 4
    assert glass.memory_allocated() <= before


class Residual(nn.Module):
    """The weights of an attention residual of Kimi-K3, whose product a forward keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Module()
        self.proj.weight = nn.Parameter(torch.ones(1, COLUMNS), requires_grad=False)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(COLUMNS), requires_grad=False)

    def forward(self) -> torch.Tensor:
        proj: Any = self.proj
        norm: Any = self.norm
        return get_cw(proj, norm) + 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters: dict[str, Any] = dict(self.named_parameters())
        for name, tensor in weights:
            default_weight_loader(parameters[name], tensor)


def residual_version(number: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(number)
    return {"proj.weight": torch.randn(1, COLUMNS), "norm.weight": torch.randn(COLUMNS)}


class ResidualRank(CardRank):
    def __init__(self) -> None:
        super().__init__(on_device(Residual()))
        self.caches = self.rank.shadowed.forward_caches
        self.live.attach({"target": self.caches}, free=PreparedSwap.free)


@on_card()
def test_product_kept_by_a_forward_follows_a_commit() -> None:
    rank = ResidualRank()
    rank.run()
    new = residual_version(1)
    rank.commit(rank.stage(new))
    result = rank.run()
    glass.synchronize()
    assert torch.equal(result.cpu(), new["norm.weight"] * new["proj.weight"].squeeze())


@on_card()
def test_product_that_a_graph_holds_refuses_updates_by_name() -> None:
    rank = ResidualRank()
    graph = glass.Graph()
    with torch.no_grad(), glass.graph(graph):
        rank.model()
    rank.caches.find(in_graphs=True)
    with pytest.raises(Refused, match=r"_attn_res_cw_cache.*captured CUDA graphs hold it"):
        rank.stage(residual_version(1))


@on_card()
def test_staging_takes_no_stream_of_a_model() -> None:
    model = on_device(Model())
    scheduler: Any = SimpleNamespace(forward_stream=glass.Stream())
    layer: Any = nn.Module()
    layer.alt_stream = glass.Stream()
    model.add_module("layer", layer)
    # the pool gives each of its 32 streams in turn: next comes the layer's again
    for _ in range(31):
        glass.Stream()
    done = threading.Event()
    answers: Any = SimpleNamespace(succeed=lambda call, answer: done.set())
    worker = StagingWorker(answers, GLASS, 0, UNPACED, lambda: streams_of(scheduler, [model]))
    # a forward of this model goes on
    release = glass.hold(layer.alt_stream)
    call: Any = object()
    worker.submit(call, lambda: version(1)["weight"].to(GLASS))
    assert done.wait(5), glass.waiting()
    release()


class Capture:
    """A capture of a graph with the hook on captures."""

    def __init__(self, graph: Any) -> None:
        capture_beside_other_threads(self._begin, self, graph)

    def _begin(self, capture: Any, *args: Any, **kwargs: Any) -> None:
        self._capture = glass.graph(*args, **kwargs)

    def __enter__(self) -> None:
        self._capture.__enter__()

    def __exit__(self, *error: object) -> None:
        self._capture.__exit__(*error)


@on_card()
def test_update_is_staged_beside_a_capture() -> None:
    rank = CardRank(on_device(Model()))
    staged: queue.SimpleQueue[Any] = queue.SimpleQueue()
    graph = glass.Graph()
    with torch.no_grad(), Capture(graph):
        thread = threading.Thread(target=lambda: staged.put(rank.stage(version(1))))
        thread.start()
        thread.join()
        result = rank.model()
    graph.replay()
    assert not result.cpu().any()
    rank.commit(staged.get_nowait())
    graph.replay()
    new = version(1)
    assert torch.equal(result.cpu(), new["weight"] + new["other"])


class Large(nn.Module):
    """A model whose comparison with an update needs megabytes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1024, 1024), requires_grad=False)

    load_weights = Residual.load_weights


@on_card(memory=128 << 20)
def test_update_is_staged_where_the_device_has_no_room_to_compare() -> None:
    rank = CardRank(on_device(Large()))
    free, _ = glass.mem_get_info()
    # the rest is for the spare piece of a swap, and for a table of addresses
    left = SPARE_BYTES + (2 << 20)
    kv_cache = torch.empty(free - left, dtype=torch.uint8, device=GLASS)
    new = {"weight": torch.randn(1024, 1024)}
    sealed = rank.stage(new)
    assert sealed.staged_as.form == "changes on host"
    rank.commit(sealed)
    assert torch.equal(rank.model.weight.cpu(), new["weight"])
    assert glass.mem_get_info()[0] < len(kv_cache)
