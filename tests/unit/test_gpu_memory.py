"""Tensors in a trainer's GPU memory: open it, cut tensors out of a buffer, and release it."""

from __future__ import annotations

import multiprocessing
import pickle
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from sglang_inflight.messages import GPUMemorySource
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.sources import gpu_sharing
from sglang_inflight.scheduler.update.sources.call_layouts import Layout
from sglang_inflight.scheduler.update.sources.gpu_memory import (
    GPUMemory,
    cut,
    own_handle,
    own_handles,
)
from sglang_inflight.scheduler.update.sources.gpu_sharing import (
    GPUHandle,
    SharedMemory,
    require_open,
)
from sglang_inflight.vocabulary.errors import Refused

CPU = torch.device("cpu")
NAMED = {
    "bytes": torch.arange(3, dtype=torch.uint8),
    # begins within an element of its own dtype
    "floats": torch.arange(6, dtype=torch.float32).view(2, 3),
    "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
}
LAYOUTS = [Layout(name, t.dtype, list(t.shape)) for name, t in NAMED.items()]
SIZES = [3, 24, 0, 2]


def check() -> None:
    """Never time out."""


def memory(number: int = 0) -> SharedMemory:
    return SharedMemory(bytes([number]), 64, 0, b"/torch_1_2_3", number, bytes(64), False)


def handle(number: int = 0) -> GPUHandle:
    return GPUHandle((64,), (1,), 0, torch.uint8, memory(number))


def packed() -> torch.Tensor:
    """Pack tensors like vLLM's trainers, in a buffer with room to spare."""
    flat = [t.reshape(-1).view(torch.uint8) for t in NAMED.values() if t.numel()]
    return torch.cat([*flat, torch.zeros(20, dtype=torch.uint8)])


@pytest.mark.parametrize("sizes", [SIZES, None])
def test_packed_tensors_are_cut_from_buffer(sizes: list[int] | None) -> None:
    found = dict(cut(packed(), LAYOUTS, sizes))
    assert list(found) == list(NAMED)
    for name, tensor in NAMED.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def test_typed_buffer_is_cut_without_copies() -> None:
    """SkyRL's buffer and all its tensors have one dtype."""
    weight = torch.arange(12, dtype=torch.bfloat16)
    layouts = [Layout("a", torch.bfloat16, [2, 3]), Layout("b", torch.bfloat16, [6])]
    a, b = (tensor for _, tensor in cut(weight, layouts, None))
    assert torch.equal(a, weight[:6].view(2, 3))
    assert torch.equal(b, weight[6:])
    # a view: only the loader copies
    assert a.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize(
    ("buffer", "sizes", "words"),
    [
        (packed(), [3, 24, 0, 4], "tensor_sizes"),
        (packed(), [3, 24, 0], "tensor_sizes"),
        (packed()[:28], None, "29 bytes, and the buffer that holds them 28"),
        (packed()[::2], None, "gaps"),
    ],
)
def test_buffer_of_wrong_size_is_refused(
    buffer: torch.Tensor, sizes: list[int] | None, words: str
) -> None:
    with pytest.raises(Refused, match=words):
        list(cut(buffer, LAYOUTS, sizes))


def test_missing_handle_of_own_gpu_is_refused() -> None:
    each = {"one": handle(1), "two": handle(2)}
    assert own_handle(each, "two") == handle(2)
    with pytest.raises(Refused, match=r"this rank's GPU 'three' \(there is one, two\)"):
        own_handle(each, "three")
    with pytest.raises(Refused, match=r"there is none"):
        own_handle({}, "three")


def test_handles_must_match_names_and_dtypes() -> None:
    layouts = [Layout("a", torch.uint8, [64])]
    assert own_handles([{"one": handle()}], "one", layouts) == [handle()]
    with pytest.raises(Refused, match="2 handles for 1 names"):
        own_handles([{"one": handle()}, {"one": handle()}], "one", layouts)
    with pytest.raises(Refused, match="'a' is announced as"):
        own_handles([{"one": handle()}], "one", [Layout("a", torch.int8, [64])])


def test_gpu_memory_on_a_cpu_is_refused() -> None:
    source = GPUMemorySource(names=[], dtypes=[], shapes=[], handles=b"")
    with pytest.raises(Refused, match="needs the trainer and the server on one machine"):
        list(GPUMemory(CPU).read(source, check, UNPACED))


class Driver:
    """Open memory of other processes, as allocations: start and size in bytes."""

    def __init__(self, *allocations: tuple[int, int]) -> None:
        self._allocations = allocations

    def address_range(self, address: int) -> tuple[int, int]:
        for begin, size in self._allocations:
            if begin <= address < begin + size:
                return begin, size
        raise ValueError("it is larger than what was shared (CUDA_ERROR_NOT_FOUND)")


@pytest.mark.parametrize(
    ("address", "nbytes"),
    [(1000, 64), (1036, 28), (1063, 1), (1064, 0), (1000, 100), (1060, 20), (5000, 0)],
)
def test_read_within_open_memory_is_allowed(
    monkeypatch: pytest.MonkeyPatch, address: int, nbytes: int
) -> None:
    driver = Driver((1000, 64), (1064, 40))
    monkeypatch.setattr(gpu_sharing, "address_range", driver.address_range)
    require_open(address, nbytes)


@pytest.mark.parametrize(("address", "nbytes"), [(1000, 105), (1064, 41), (999, 2), (2000, 1)])
def test_read_beyond_open_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: int, nbytes: int
) -> None:
    driver = Driver((1000, 64), (1064, 40))
    monkeypatch.setattr(gpu_sharing, "address_range", driver.address_range)
    with pytest.raises(ValueError, match="larger than what was shared"):
        require_open(address, nbytes)


def test_address_unknown_to_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sharing, "address_range", lambda address: (0, 0))
    with pytest.raises(ValueError, match="knows of no memory there"):
        require_open(1000, 1)


def test_handle_larger_than_shared_memory_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte may be read, not even once."""
    shared = torch.zeros(63, dtype=torch.uint8)
    driver = Driver((shared.data_ptr(), 63))
    monkeypatch.setattr(gpu_sharing, "address_range", driver.address_range)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: shared)
    with pytest.raises(Refused, match="cannot be opened: it is larger than what was shared"):
        GPUMemory(CPU)._open_again(handle(1), keep=False)


def test_kept_memory_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory shared once counts as one use, however many calls name it."""
    opened: list[tuple[bytes, Any]] = []

    def rebuild(*arguments: Any) -> torch.Tensor:
        tensor = torch.zeros(64)
        opened.append((arguments[7], weakref.ref(tensor)))
        return tensor

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(gpu_sharing, "address_range", lambda address: (address, 64))
    there = GPUMemory(CPU)
    for _ in range(3):
        there._open_again(handle(1), keep=True)
    ((first, is_open),) = opened
    assert (first, is_open() is None) == (b"\1", False)
    there._open_again(handle(2), keep=True)
    assert is_open() is None
    there._open_again(handle(3), keep=False)
    there._open_again(handle(3), keep=False)
    assert [name for name, _ in opened] == [b"\1", b"\2", b"\3", b"\3"]
    assert all(is_open() is None for _, is_open in opened)
    there._open_again(handle(4), keep=True)
    there.stop_reading()
    assert opened[-1][1]() is None


# ---- on a GPU ----------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="two processes share memory of a GPU, and there is none"
)


def _share(tensor: torch.Tensor) -> Any:
    return reductions.reduce_tensor(tensor)


def _train(orders: Connection) -> None:
    """Share memory, overwrite it, and send the bytes left after freeing it."""
    gpu = str(torch.cuda.get_device_properties(0).uuid)
    match orders.recv():
        case "each":
            tensors = [tensor.cuda() for tensor in NAMED.values()]
            shared: Any = [{gpu: _share(tensor)[1]} for tensor in tensors]
        case "buffer":
            tensors = [packed().cuda()]
            shared = {gpu: _share(tensors[0])[1]}
        case "with what rebuilds it":
            tensors = [packed().cuda()]
            shared = {gpu: _share(tensors[0])}
    torch.cuda.synchronize()
    orders.send(pickle.dumps(shared))
    assert orders.recv() == "write"
    while tensors:
        tensors.pop().zero_()
    torch.cuda.synchronize()
    orders.send("written")
    assert orders.recv() == "free"
    torch.cuda.ipc_collect()
    orders.send(torch.cuda.memory_allocated())


@pytest.fixture
def trainer() -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_train, args=(theirs,))
    process.start()
    yield ours
    process.join(60)
    assert process.exitcode == 0


@needs_cuda
@pytest.mark.parametrize(
    ("which", "sizes"), [("each", None), ("buffer", SIZES), ("with what rebuilds it", None)]
)
def test_gpu_memory_of_another_process_is_copied_and_freed(
    trainer: Connection, which: str, sizes: list[int] | None
) -> None:
    """Memory is copied before the trainer may write, twice from a buffer, and can be freed
    afterwards.
    """
    trainer.send(which)
    handles = trainer.recv()
    there = GPUMemory(torch.device("cuda", 0))
    source = GPUMemorySource(
        names=[layout.name for layout in LAYOUTS],
        dtypes=[str(layout.dtype).removeprefix("torch.") for layout in LAYOUTS],
        shapes=[[*layout.shape] for layout in LAYOUTS],
        handles=handles,
        sizes=sizes,
        keeps_buffer=sizes is not None,
    )
    for _ in range(2 if sizes else 1):
        copies = {name: tensor.cpu() for name, tensor in there.read(source, check, UNPACED)}
        assert all(torch.equal(copies[name], tensor) for name, tensor in NAMED.items())
    trainer.send("write")
    assert trainer.recv() == "written"
    assert all(torch.equal(copies[name], tensor) for name, tensor in NAMED.items())
    there.stop_reading()
    trainer.send("free")
    assert trainer.recv() == 0
