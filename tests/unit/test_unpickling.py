"""Pickles of weight senders are read unchanged, and no other pickle has an effect."""

from __future__ import annotations

import importlib
import io
import itertools
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from multiprocessing.resource_sharer import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
from sglang.srt.model_executor.model_runner_components.weight_updater import (
    LocalSerializedTensor,
)
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import _rebuild_cuda_tensor_modified
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata
from torch.multiprocessing import reductions

from sglang_inflight.scheduler.update.sources.unpickling import unpickle

PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
# no storage class of their own, so torch cannot load them by value
ONLY_SHARED = (torch.float8_e4m3fn, torch.uint16)


def pairs(dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, torch.Tensor]]:
    matrix = torch.arange(12).to(dtype).view(3, 4)
    return [
        ("matrix", matrix),
        ("transposed", matrix.T),
        ("part", matrix[1:, 2:]),
        ("scalar", matrix[1, 1].clone()),
        ("empty", torch.zeros(0, 3).to(dtype)),
        ("wide", matrix[:1].expand(5, 4)),
        ("parameter", torch.nn.Parameter(matrix.clone(), requires_grad=False)),
    ]


def expect(found: Any, expected: list[tuple[str, torch.Tensor]]) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, tensor), (_, value) in zip(found, expected, strict=True):
        assert (tensor.dtype, tensor.shape) == (value.dtype, value.shape), name
        assert torch.equal(tensor.double(), value.double()), name


def test_unpickling_rests_after_every_few_tensors() -> None:
    """Reading twenty thousand tensors takes seconds of Python, and the loop would wait."""
    rests: list[bool] = []
    sent = [(str(n), torch.full((2,), float(n))) for n in range(200)]
    payload = MultiprocessingSerializer.serialize(sent)
    expect(unpickle(payload, lambda: rests.append(True)), sent)
    assert len(rests) >= len(sent) // 8


# ---- what senders send -------------------------------------------------------------------


@pytest.fixture(autouse=True)
def strategy() -> Iterator[None]:
    """Return to the strategy of before, which belongs to the whole process."""
    before = torch.multiprocessing.get_sharing_strategy()
    yield
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.fixture(params=["file_system", "file_descriptor"])
def sharing(request: pytest.FixtureRequest) -> str:
    torch.multiprocessing.set_sharing_strategy(request.param)
    return str(request.param)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_by_value_are_read(dtype: torch.dtype, protocol: int) -> None:
    expect(unpickle(pickle.dumps(pairs(dtype), protocol)), pairs(dtype))


def test_tensors_by_value_are_read_from_a_file(tmp_path: Path) -> None:
    weights = [("large", torch.randn(300, 1000)), *pairs()]
    path = tmp_path / "payload"
    path.write_bytes(pickle.dumps(weights))
    with path.open("rb") as file:
        expect(unpickle(file), weights)


def test_tensors_by_value_are_read_without_torch_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.load`` takes longer for a small tensor than all the rest of an update."""
    monkeypatch.setattr(torch, "load", None)
    for count in (1, 255, 256, 65_536, 1 << 20):
        for dtype in (*DTYPES, torch.bool, torch.complex64):
            sent = [("a", (torch.arange(count) % 2).to(dtype))]
            ((_, found),) = unpickle(pickle.dumps(sent))
            assert torch.equal(found, sent[0][1]), (count, dtype)


@pytest.mark.parametrize("nbytes", [9, 300, -2, -1])
def test_storage_cut_short_is_not_read(nbytes: int) -> None:
    loads, (saved,) = torch.arange(300.0)._typed_storage().__reduce__()
    with pytest.raises(Exception):  # noqa: B017, PT011 (any type of error)
        unpickle(pickle.dumps(Calls(loads, saved[:nbytes])))


def test_conjugated_tensor_is_not_read_as_plain() -> None:
    conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj()
    with pytest.raises(Exception):  # noqa: B017, PT011 (any type of error)
        unpickle(pickle.dumps([("a", conjugated)]))


def test_large_bytearray_is_read() -> None:
    """Protocol 5 has a bytearray outside of its frames."""
    for size in (3, 1 << 17):
        assert unpickle(pickle.dumps([bytearray(b"x" * size)], 5)) == [bytearray(b"x" * size)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_parameters_with_attributes_are_read(protocol: int) -> None:
    """Megatron marks its parameters with attributes."""
    parameter = torch.nn.Parameter(torch.randn(3))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    tensor = torch.randn(2)
    tensor.partition_dim = 0  # type: ignore[attr-defined]
    weights = [("parameter", parameter), ("tensor", tensor)]
    expect(unpickle(pickle.dumps(weights, protocol)), weights)


@pytest.mark.parametrize("dtype", DTYPES + ONLY_SHARED, ids=str)
def test_tensors_in_shared_memory_are_read(sharing: str, dtype: torch.dtype) -> None:
    expect(unpickle(MultiprocessingSerializer.serialize(pairs(dtype))), pairs(dtype))


def test_flattened_bucket_is_read(sharing: str) -> None:
    weights = [pair for pair in pairs() if pair[0] != "empty"]
    bucket = FlattenedTensorBucket(named_tensors=weights)
    sent = {
        "flattened_tensor": bucket.get_flattened_tensor(),
        "metadata": bucket.get_metadata(),
    }
    found = unpickle(MultiprocessingSerializer.serialize(sent))
    assert [type(item) for item in found["metadata"]] == [FlattenedTensorMetadata] * len(weights)
    expect(FlattenedTensorBucket(**found).reconstruct_tensors(), weights)


def test_payload_of_each_rank_is_read() -> None:
    """verl sends tensors with a payload for each rank."""
    values = [MultiprocessingSerializer.serialize(torch.full((2,), rank)) for rank in (0.0, 1.0)]
    ((name, tensor),) = unpickle(
        MultiprocessingSerializer.serialize([("a", LocalSerializedTensor(values=values))])
    )
    assert (name, type(tensor)) == ("a", LocalSerializedTensor)
    assert unpickle(tensor.values[1]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dumps", [pickle.dumps, ForkingPickler.dumps])
def test_checkpoint_engine_messages_are_read(dumps: Callable[[Any], Any]) -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    handle = reductions.reduce_tensor(torch.arange(9, dtype=torch.uint8).share_memory_())
    rebuild, arguments = unpickle(bytes(ForkingPickler.dumps(handle)))
    assert rebuild(*arguments).tolist() == list(range(9))
    listing = [{"name": "a", "shape": torch.Size([2, 3]), "dtype": torch.bfloat16, "offset": 256}]
    assert unpickle(bytes(dumps(listing))) == listing
    assert unpickle(bytes(dumps(None))) is None


ON_GPU: dict[str, Any] = {
    "tensor_cls": torch.Tensor,
    "tensor_size": torch.Size([2, 3]),
    "tensor_stride": (3, 1),
    "tensor_offset": 0,
    "storage_cls": torch.UntypedStorage,
    "dtype": torch.bfloat16,
    "storage_device": "GPU-c1a0b2",
    "storage_handle": b"handle",
    "storage_size_bytes": 12,
    "storage_offset_bytes": 512,
    "requires_grad": False,
    "ref_counter_handle": b"/torch_1_2_3",
    "ref_counter_offset": 9_999,
    "event_handle": bytes(64),
    "event_sync_required": True,
}


class Handle:
    """Pickles like torch's GPU tensor, with the fields in ``said`` replaced."""

    def __init__(self, rebuild: Callable[..., Any], **said: Any) -> None:
        self._call = rebuild, tuple({**ON_GPU, **said}.values())

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


Received = list[tuple[Any, ...]]


@pytest.fixture(params=[reductions.rebuild_cuda_tensor, _rebuild_cuda_tensor_modified])
def rebuild(request: pytest.FixtureRequest) -> Callable[..., Any]:
    found: Callable[..., Any] = request.param
    return found


def unpickle_here(
    monkeypatch: pytest.MonkeyPatch, rebuild: Callable[..., Any], handle: Handle
) -> tuple[Any, Received]:
    """Return the outcome of ``handle`` and the arguments of ``rebuild``. There is no GPU memory."""
    received: Received = []
    payload = pickle.dumps([("a", handle)])
    module = importlib.import_module(rebuild.__module__)
    monkeypatch.setattr(module, rebuild.__name__, lambda *args: received.append(args))
    try:
        return unpickle(payload), received
    except (ValueError, TypeError, pickle.UnpicklingError) as error:
        return error, received


@pytest.mark.parametrize(
    "said",
    [{}, {"tensor_size": (0, 3), "storage_handle": None, "storage_size_bytes": 0}],
    ids=["whole", "empty"],
)
def test_gpu_handle_is_opened_with_senders_arguments(
    monkeypatch: pytest.MonkeyPatch, rebuild: Callable[..., Any], said: dict[str, Any]
) -> None:
    """The memory is opened with the sender's arguments."""
    found, received = unpickle_here(monkeypatch, rebuild, Handle(rebuild, **said))
    assert found == [("a", None)]
    assert received == [tuple({**ON_GPU, **said}.values())]


# ---- hostile pickles ---------------------------------------------------------------------


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


class Writes:
    """Pickles as ``target`` with ``state`` set on it."""

    def __init__(self, target: Any, state: Any) -> None:
        self._target, self._state = target, state

    def pickled(self) -> bytes:
        target = pickle.dumps(self._target, 2).removesuffix(pickle.STOP)
        state = pickle.dumps(self._state, 2).removeprefix(pickle.PROTO + b"\2")
        return target + state.removesuffix(pickle.STOP) + pickle.BUILD + pickle.STOP


def deep_key() -> bytes:
    """Pickle a dict keyed by a tuple nested a hundred times. Hashing the key never ends."""
    deeper = b"".join(
        pickle.BINPUT + bytes([i]) + pickle.BINGET + bytes([i]) + pickle.TUPLE2 for i in range(100)
    )
    key = pickle.EMPTY_TUPLE + deeper
    return pickle.PROTO + b"\4" + pickle.EMPTY_DICT + key + b"N" + pickle.SETITEM + pickle.STOP


STORAGE = torch.ones(4)._typed_storage()

HOSTILE: dict[str, bytes] = {
    "a command": pickle.dumps(Calls(os.system, "touch /tmp/inflight-test-was-here")),
    "a loop": pickle.dumps(Calls(list, Calls(itertools.repeat, 0, 200_000_000))),
    "much memory": pickle.dumps(Calls(bytearray, 1 << 40)),
    "a storage of any size": pickle.dumps(Calls(torch.UntypedStorage, 1 << 40)),
    "a tensor larger than its storage": pickle.dumps(
        Calls(
            torch._utils._rebuild_tensor_v2,
            STORAGE,
            0,
            (1 << 40,),
            (1,),
            False,
            {},
        )
    ),
    "a tensor before its storage": pickle.dumps(
        Calls(
            torch._utils._rebuild_tensor_v2,
            STORAGE,
            0,
            (2,),
            (-1,),
            False,
            {},
        )
    ),
    "a class that is written to": Writes(torch.Tensor, (None, {"shape": 5})).pickled(),
    "a class of SGLang's": Writes(FlattenedTensorMetadata, (None, {"name": 5})).pickled(),
    "a function that is written to": Writes(
        torch._utils._rebuild_tensor_v2, {"__code__": None}
    ).pickled(),
    "a tensor that is written to": Writes(torch.ones(2), {"a": 1}).pickled(),
    "slots": Writes(LocalSerializedTensor(values=[]), (None, {"values": 1})).pickled(),
    "a type that rebuilds": pickle.dumps(
        Calls(
            torch._tensor._rebuild_from_type_v2, torch.UntypedStorage, torch.Tensor, (1 << 40,), {}
        )
    ),
    "a key that is no name": pickle.dumps([{5: 1}]),
    "a deep key": deep_key(),
    "a set": pickle.dumps({1}),
    "items of a tensor": pickle.dumps(torch.ones(2), 2).removesuffix(pickle.STOP)
    + b"K\0K\1"
    + pickle.SETITEM
    + pickle.STOP,
    "a partial": pickle.dumps(SimpleNamespace(a=1)),
    "a request": pickle.dumps(Calls(DupFd, 1)),
    "a codec": pickle.dumps(Calls(importlib.import_module("_codecs").encode, "a" * 9, "idna")),
    "a named dict": pickle.dumps(OrderedDict([(((),), 1)])),
    "a persistent id": pickle.PROTO + b"\4" + pickle.NONE + pickle.BINPERSID + pickle.STOP,
    "a frame without end": pickle.PROTO + b"\4" + pickle.FRAME + struct.pack("<Q", 1 << 62),
    "bytes without end": pickle.PROTO + b"\4" + pickle.BINBYTES8 + struct.pack("<Q", 1 << 62),
    "nothing": b"",
    "garbage": b"garbage",
    "no end": pickle.dumps(pairs())[:-50],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_pickle_is_refused_without_effect(kind: str) -> None:
    before = {name: vars(kind).copy() for name, kind in classes().items()}
    with pytest.raises(Exception) as refused:  # noqa: PT011 (any type of error)
        unpickle(HOSTILE[kind])
    assert not isinstance(refused.value, AssertionError)
    assert {name: vars(kind) for name, kind in classes().items()} == before
    assert not Path("/tmp/inflight-test-was-here").exists()


def classes() -> dict[str, type]:
    return {
        kind.__name__: kind
        for kind in (
            torch.Tensor,
            torch.nn.Parameter,
            torch.UntypedStorage,
            torch.storage.TypedStorage,
            FlattenedTensorMetadata,
            LocalSerializedTensor,
            DupFd,
        )
    }


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ({"ref_counter_offset": 10_000}, "at 10000, of 10000"),
        ({"ref_counter_offset": -1}, "is not an integer"),
        ({"ref_counter_handle": b"/dev/shm/another"}, "not one of torch's"),
        ({"tensor_size": (2, 4)}, "larger than its memory"),
        ({"tensor_offset": 1}, "larger than its memory"),
        ({"tensor_stride": (3, -1)}, "is not an integer"),
        ({"storage_handle": None}, "has no memory"),
        ({"tensor_size": (0, 3), "ref_counter_offset": 10_000}, "at 10000, of 10000"),
        ({"event_handle": b""}, "64 bytes"),
        ({"storage_cls": torch.Tensor}, "not torch's for a tensor"),
        ({"tensor_cls": torch.UntypedStorage}, "not torch's for a tensor"),
    ],
)
def test_gpu_handle_beyond_its_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    rebuild: Callable[..., Any],
    said: dict[str, Any],
    word: str,
) -> None:
    """Torch would write beyond its counter file, or hand out memory that was not shared."""
    found, received = unpickle_here(monkeypatch, rebuild, Handle(rebuild, **said))
    assert (word in str(found), received) == (True, [])


def test_tensor_larger_than_its_storage_is_refused() -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    made, (kind, storage, metadata) = reductions.reduce_tensor(torch.arange(4.0).share_memory_())
    offset, _, stride, needs_grad = metadata
    sent = Calls(made, kind, storage, (offset, (1 << 20,), stride, needs_grad))
    payload = bytes(ForkingPickler.dumps(sent))
    with pytest.raises(pickle.UnpicklingError, match="larger than its storage"):
        unpickle(payload)


def test_invalid_storage_is_refused() -> None:
    buffer = io.BytesIO()
    torch.save({"a": 1}, buffer)
    loads = importlib.import_module("torch.storage")._load_from_bytes
    with pytest.raises(pickle.UnpicklingError, match="expected a storage, got a dict"):
        unpickle(pickle.dumps(Calls(loads, buffer.getvalue())))
