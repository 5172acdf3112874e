"""A sender's writes to its buffer after the end of a call reach no weight."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from sglang_inflight.messages import DistributedSource, IPCSource, TensorSource, is_sparse
from sglang_inflight.scheduler.update.jobs import Jobs
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel
from sglang_inflight.scheduler.update.sources import batches
from sglang_inflight.scheduler.update.sources.batches import (
    Packed,
    Weights,
    in_parts,
    one_batch,
    with_whole_modules,
)
from sglang_inflight.scheduler.update.update import Update
from tests.support.checkpoint_engine import BUFFER_BYTES, checkpoint_engine
from tests.support.rank import shadows_of
from tests.unit.fakes import name_device_as_trainers_do, uncounted

pytestmark = pytest.mark.usefixtures("either_way")

Pairs = Iterable[tuple[str, torch.Tensor]]
CPU = torch.device("cpu")
# two tensors do not fit into the trainer's buffer
SIZE = BUFFER_BYTES // 4 - 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(2 * SIZE), requires_grad=False)
        self.o_proj = nn.Parameter(torch.zeros(SIZE), requires_grad=False)


class Model(nn.Module):
    """Three layers. A trainer sends ``q`` and ``kv`` apart, and the model fuses them."""

    def __init__(self, read: Callable[[Pairs], Pairs]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self._read = read
        self.calls: list[list[str]] = []

    def load_weights(self, weights: Pairs) -> None:
        parameters = dict(self.named_parameters())
        halves: dict[str, torch.Tensor] = {}
        taken: list[str] = []
        for name, tensor in self._read(weights):
            taken.append(name)
            layer, _, part = name.removesuffix(".weight").rpartition(".")
            if part == "o_proj":
                write(parameters[f"{layer}.o_proj"], tensor)
                continue
            halves[f"{layer}.{part}"] = tensor
            if {f"{layer}.q", f"{layer}.kv"} <= halves.keys():
                both = torch.cat([halves.pop(f"{layer}.q"), halves.pop(f"{layer}.kv")])
                write(parameters[f"{layer}.fused"], both)
        self.calls.append(taken)


def write(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


def gathers(weights: Pairs) -> Pairs:
    return sorted(weights, key=lambda pair: pair[0])


def streams(weights: Pairs) -> Pairs:
    return weights


class Rank:
    def __init__(self, *models: Model) -> None:
        self._shadowed = [
            shadowed(role, model) for role, model in zip(("target", "draft"), models, strict=False)
        ]
        metrics = uncounted()
        groups: Any = None
        self._jobs = Jobs(
            self._shadowed,
            shadows_of(self._shadowed),
            groups,
            metrics,
            mode=StagingMode.DEVICE,
            device=CPU,
            rate_limit=UNPACED,
            check_finite=True,
            layout={},
        )

    def receive(self, handles: dict[str, str]) -> int:
        """Return the number of tensors taken in, from the rank's answer."""
        call: Any = SimpleNamespace(
            update_id="u", partial=False, may_be_empty=False, in_place=False, asks_digests=False
        )
        update = Update(call, base_version="")
        self._jobs.prepare(update, None, after=None)
        staged = self._jobs.fill(update, IPCSource(zmq_handles=handles), None)
        self._jobs.seal(update, None)
        assert update.sealed is not None
        update.sealed.swap.make()
        return staged.tensors


def shadowed(role: str, model: nn.Module) -> ShadowedModel:
    runner: Any = SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(
            model_path="one", revision=None, hf_config=None, hf_text_config=None
        ),
        load_config=SimpleNamespace(download_dir=None, load_format="auto"),
        weight_updater=SimpleNamespace(custom_weight_loaders={}),
    )
    shadowed = ShadowedModel(role, runner)
    # the start's checkpoint is on this machine
    shadowed.findings._checkpoint_shapes = {
        name: tuple(tensor.shape) for name, tensor in sent().items()
    }
    return shadowed


def sent() -> dict[str, torch.Tensor]:
    """Return a version with a different number in each tensor."""
    names = [
        f"layers.{layer}.{part}.weight" for layer in range(3) for part in ("q", "kv", "o_proj")
    ]
    return {name: torch.full((SIZE,), float(n)) for n, name in enumerate(names, start=1)}


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Name the device like the reference platform, and turn off gradients as for the jobs."""
    name_device_as_trainers_do(monkeypatch)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("read", [gathers, streams])
@pytest.mark.parametrize("count", [1, 2])
def test_refilled_buffer_changes_no_loaded_weight(
    count: int, read: Callable[[Pairs], Pairs]
) -> None:
    models = [Model(read) for _ in range(count)]
    rank = Rank(*models)
    with checkpoint_engine(sent()) as (engine, handles):
        assert rank.receive(handles) == len(sent())
    assert (engine.finished, engine.error) == (True, None)
    for model in models:
        assert len(model.calls) > 1, "the buffer was to be filled several times"
        for number, layer in enumerate(model.layers):
            assert isinstance(layer, Attention)
            parts = (layer.fused[:SIZE], layer.fused[SIZE:], layer.o_proj)
            found = [set(part.tolist()) for part in parts]
            assert found == [{3.0 * number + n} for n in (1, 2, 3)]


def generator(values: Iterator[Any]) -> Any:
    """Silence mypy: the sources' type is narrower than an iterator."""
    return values


def pairs(*names: str) -> Weights:
    return ((name, torch.ones(2)) for name in names)


def names_of(weights: Pairs) -> list[str]:
    return [name for name, _ in weights]


def test_batch_ends_at_a_module_boundary() -> None:
    def sources() -> Iterator[Weights]:
        yield pairs("a.x.w", "b.x.w", "b.y.w")
        yield pairs("b.z.w", "c.x.w")
        yield pairs("c.y.w")

    found = [names_of(batch) for batch in with_whole_modules(generator(sources()))]
    assert found == [["a.x.w"], ["b.x.w", "b.y.w", "b.z.w"], ["c.x.w", "c.y.w"]]


@pytest.mark.parametrize("read", [gathers, streams])
def test_batch_keeps_no_reference_to_buffer(read: Callable[[Pairs], Pairs]) -> None:
    freed: list[bool] = []

    def source() -> Iterator[Weights]:
        memory = numpy.ones(4, numpy.float32)
        buffer, is_there = torch.from_numpy(memory), weakref.ref(memory)
        del memory
        yield (pair for pair in [("a.x.w", buffer[:2]), ("b.x.w", buffer[2:])])
        del buffer
        freed.append(is_there() is None)

    for batch in with_whole_modules(generator(source())):
        deque(read(batch), maxlen=0)
    assert freed == [True]


def test_module_over_limit_is_not_copied_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_BYTES", 8)

    def sources() -> Iterator[Weights]:
        yield pairs("a.x.w", "a.y.w")
        yield pairs("a.z.w")

    found = [names_of(batch) for batch in with_whole_modules(generator(sources()))]
    assert found == [["a.x.w", "a.y.w"], ["a.z.w"]]


def test_part_ends_at_a_module_boundary() -> None:
    found = [names_of(part) for part in in_parts(pairs("a.x.w", "a.y.w", "b.x.w", "b.y.w"), most=4)]
    assert found == [["a.x.w", "a.y.w"], ["b.x.w", "b.y.w"]]
    assert [names_of(part) for part in in_parts(pairs())] == [[]]


@pytest.mark.parametrize(
    ("load_format", "holds_halves"),
    [(None, False), ("flattened_bucket", False), ("sparse", True), ("sparse_bucket", True)],
)
def test_load_format_tells_whether_tensors_are_halves(
    load_format: str | None, holds_halves: bool
) -> None:
    of_tensors = TensorSource(serialized_named_tensors=[], load_format=load_format)
    broadcast = DistributedSource(
        names=[], dtypes=[], shapes=[], group_name="trainer", load_format=load_format
    )
    assert [is_sparse(of_tensors), is_sparse(broadcast)] == [holds_halves] * 2


def test_closing_a_batch_closes_its_source() -> None:
    closed = threading.Event()

    def source() -> Iterator[Any]:
        try:
            yield from pairs("a.x.w", "b.x.w")
        finally:
            closed.set()

    batches = one_batch(generator(source()))
    next(next(batches))
    batches.close()
    assert closed.is_set()


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize(
    ("dtype", "shape", "start"),
    [
        (torch.uint8, [3, 1], 3),
        (torch.bfloat16, [2, 3], 6),
        (torch.bfloat16, [], 8),
        (torch.bfloat16, [0, 3], 8),
        (torch.int32, [1, 2, 2, 1], 8),
    ],
)
def test_packed_tensor_is_a_view_of_its_bytes(
    offset: int, dtype: torch.dtype, shape: list[int], start: int
) -> None:
    """The buffer may be a part of a larger one."""
    buffer = torch.arange(64, dtype=torch.uint8)[offset:]
    end = start + dtype.itemsize * torch.Size(shape).numel()
    found = Packed(buffer).view(start, end, dtype, shape)
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, torch.Size(shape), True)
    assert torch.equal(found.view(-1).view(torch.uint8), buffer[start:end])
    assert found.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("start", "end", "shape"),
    [(0, 8, [3]), (8, 4, [2]), (-8, 0, [2]), (60, 68, [2]), (1, 5, [1])],
)
def test_packed_tensor_beyond_its_bytes_is_refused(start: int, end: int, shape: list[int]) -> None:
    """The buffer's memory goes on behind it."""
    packed = Packed(torch.zeros(128, dtype=torch.uint8)[:64])
    with pytest.raises(RuntimeError):
        packed.view(start, end, torch.float32, shape)


def test_packed_tensor_within_an_element_is_copied() -> None:
    buffer = torch.arange(64, dtype=torch.uint8)
    found = Packed(buffer).view_or_copy(3, 11, torch.float32, [2])
    assert torch.equal(found.view(torch.uint8), buffer[3:11])


def test_tensors_of_a_typed_bucket_are_read() -> None:
    """An older sender's bucket has one dtype, and is counted in elements."""
    row = torch.arange(12.0)
    assert torch.equal(Packed(row).view(4, 8, torch.float32, [2, 2]), row[4:8].view(2, 2))
