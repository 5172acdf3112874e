"""Handles to a trainer's GPU memory are read from torch's pickles, and nothing is run."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.utils.patch_torch import _rebuild_cuda_tensor_modified
from torch.multiprocessing import reductions

from sglang_inflight.scheduler.update.sources.gpu_memory import (
    HandleOfEach,
    read_handles,
)
from sglang_inflight.scheduler.update.sources.gpu_sharing import GPUHandle, SharedMemory
from sglang_inflight.vocabulary.errors import Refused

# Python writes older protocols only on request
PROTOCOLS = range(3, pickle.HIGHEST_PROTOCOL + 1)
GPU = "4a6c1f0e-7d0b-9b2e-4d63-000000000001"
OTHER = "4a6c1f0e-7d0b-9b2e-4d63-000000000002"
Arguments = dict[str, Any]


def arguments(**said: Any) -> Arguments:
    """Return torch's arguments for sharing a GPU tensor, by its rebuild function's parameters."""
    tensor = torch.zeros(6, 4, dtype=torch.bfloat16)[1:3]
    # torch names a file of counters like any shared file
    _, counter_file, _ = torch.zeros(1).untyped_storage()._share_filename_cpu_()
    found = {
        "tensor_cls": type(tensor),
        "tensor_size": tensor.size(),
        "tensor_stride": tensor.stride(),
        "tensor_offset": tensor.storage_offset(),
        "storage_cls": type(tensor._typed_storage()),
        "dtype": tensor.dtype,
        "storage_device": 3,
        "storage_handle": b"\2c" + bytes(64),
        "storage_size_bytes": tensor.untyped_storage().nbytes(),
        "storage_offset_bytes": 512,
        "requires_grad": False,
        "ref_counter_handle": counter_file,
        "ref_counter_offset": 7,
        "event_handle": bytes(64),
        "event_sync_required": True,
    }
    assert list(found) == list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    return {**found, **said}


def pickled(of_each: Any, protocol: int | None = None) -> bytes:
    return pickle.dumps(of_each, protocol)


def read_each(content: bytes) -> list[HandleOfEach]:
    found = read_handles(content)
    assert isinstance(found, list)
    return found


def expect_first(handle: GPUHandle) -> None:
    memory = handle.memory
    assert memory is not None
    assert memory.counter_file.startswith(b"/torch_")
    assert handle == GPUHandle(
        (2, 4),
        (4, 1),
        4,
        torch.bfloat16,
        SharedMemory(b"\2c" + bytes(64), 48, 512, memory.counter_file, 7, bytes(64), True),
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_vllm_handles_are_read(protocol: int) -> None:
    """Each tensor has a handle per GPU, merged from all ranks of the trainer."""
    each = [
        {GPU: tuple(arguments().values()), OTHER: tuple(arguments(storage_device=0).values())},
        {GPU: tuple(arguments(dtype=torch.float8_e4m3fn).values())},
    ]
    first, second = read_each(pickled(each, protocol))
    assert list(first) == [GPU, OTHER]
    expect_first(first[GPU])
    expect_first(first[OTHER])
    assert second[GPU].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("rebuild", [reductions.rebuild_cuda_tensor, _rebuild_cuda_tensor_modified])
def test_handles_with_rebuild_function_are_read(rebuild: Callable[..., Any]) -> None:
    """SkyRL sends its one buffer so, vLLM 0.18 each tensor, and SGLang names the device by UUID."""
    values = tuple(arguments(storage_device=f"GPU-{GPU}").values())
    found = read_handles(pickled({GPU: (rebuild, values)}))
    assert isinstance(found, dict)
    expect_first(found[GPU])
    assert read_handles(pickled([{GPU: (rebuild, values)}])) == [found]


def test_handle_of_a_parameter_is_read() -> None:
    values = tuple(arguments(tensor_cls=torch.nn.Parameter, requires_grad=True).values())
    (found,) = read_each(pickled([{GPU: values}]))
    expect_first(found[GPU])


def test_handle_of_empty_tensor_is_read() -> None:
    """Torch shares no memory for an empty tensor."""
    nothing = dict.fromkeys(
        ("storage_handle", "ref_counter_handle", "event_handle", "event_sync_required")
    )
    values = arguments(
        tensor_size=torch.Size([0, 3]),
        tensor_stride=(3, 1),
        tensor_offset=0,
        storage_size_bytes=0,
        storage_offset_bytes=0,
        ref_counter_offset=0,
        **nothing,
    )
    found = read_handles(pickled([{GPU: tuple(values.values())}]))
    assert found == [{GPU: GPUHandle((0, 3), (3, 1), 0, torch.bfloat16, None)}]


# ---- hostile handles ---------------------------------------------------------------------


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


def test_pickled_call_is_not_run(tmp_path: Path) -> None:
    there = tmp_path / "it ran"
    content = pickled([{GPU: Calls(os.mkdir, str(there))}])
    with pytest.raises(Refused, match="not allowed in a handle"):
        read_handles(content)
    assert not there.exists()
    # without this run the test proves nothing
    pickle.loads(content)
    assert there.exists()


def test_pickled_rebuild_call_opens_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rebuild function's name is data, and calling the function is refused."""
    called: list[Any] = []
    content = pickled([{GPU: Calls(reductions.rebuild_cuda_tensor, *arguments().values())}])
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *args: called.append(args))
    with pytest.raises(Refused, match="calls something other than an allowed function"):
        read_handles(content)
    assert not called


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"tensor_size": torch.Size([1 << 40, 4])}, "larger than its memory"),
        ({"tensor_offset": 20}, "larger than its memory"),
        ({"tensor_offset": -1}, "is not an integer"),
        ({"tensor_stride": (4, -1)}, "is not an integer"),
        ({"tensor_stride": (4,)}, "2 dimensions has 1 strides"),
        ({"storage_size_bytes": 1 << 63}, "is not an integer"),
        ({"storage_offset_bytes": -512}, "is not an integer"),
        ({"storage_handle": None}, "has no memory"),
        ({"storage_handle": "\2c"}, "description of the memory"),
        # torch would write to these addresses on release of the memory
        ({"ref_counter_offset": 10_000}, "at 10000, of 10000"),
        ({"ref_counter_offset": -1}, "is not an integer"),
        ({"ref_counter_handle": b"/sem.another"}, "not one of torch's"),
        ({"ref_counter_handle": b"/torch_1_2_3/../x"}, "not one of torch's"),
        ({"ref_counter_handle": None}, "not one of torch's"),
        ({"event_handle": bytes(32)}, "64 bytes"),
        ({"event_sync_required": 2}, "description of the memory"),
        ({"dtype": "torch.bfloat16"}, "not torch's for a tensor"),
        ({"tensor_cls": torch.UntypedStorage}, "not torch's for a tensor"),
        ({"storage_cls": torch.Tensor}, "not torch's for a tensor"),
        ({"storage_device": None}, "not torch's for a tensor"),
        ({"storage_cls": dict}, "not allowed in a handle"),
    ],
)
def test_handle_beyond_shared_memory_is_refused(said: Arguments, words: str) -> None:
    content = pickled([{GPU: tuple(arguments(**said).values())}])
    with pytest.raises(Refused, match=words):
        read_handles(content)


VALUES = tuple(arguments().values())


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"garbage", id="no pickle"),
        pytest.param(pickled(None), id="None"),
        pytest.param(pickled([VALUES]), id="of no GPU"),
        pytest.param(pickled({7: VALUES}), id="a GPU by its number"),
        pytest.param(pickled([{GPU: VALUES[:-1]}]), id="too little"),
        pytest.param(pickled([{GPU: (*VALUES, 1)}]), id="too much"),
        pytest.param(pickled([{GPU: ("torch.rebuild", VALUES)}]), id="rebuilt by another"),
        pytest.param(pickled([{GPU: torch.zeros(2)}]), id="a tensor"),
        pytest.param(pickled([{GPU: VALUES}])[:-30], id="cut off"),
        pytest.param(b"\x80\x04" + b"(" * 3000 + b".", id="marks"),
    ],
)
def test_malformed_handle_is_refused(content: bytes) -> None:
    with pytest.raises(Refused, match="ipc_handles_pickled"):
        read_handles(content)
