"""Handles to a trainer's memory on a GPU, as vLLM's trainers pickle them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch

from sglang_inflight.errors import Refused
from sglang_inflight.scheduler.update.sources.regular_file import describe
from sglang_inflight.scheduler.update.sources.unpickling import Function, Unpickler

# of CUDA's own handles, in bytes
_EVENT_BYTES = 64
# of the file in which torch counts who uses memory: a place beyond its end is written to all the
# same, when the memory is let go of
_COUNTERS = 10_000
# torch makes a file's name of its process and two numbers
_COUNTER_FILE = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+", re.ASCII)

# what torch rebuilds such a tensor with; SGLang's stands in for it in trainers that use SGLang
_REBUILD = frozenset(
    {
        "torch.multiprocessing.reductions.rebuild_cuda_tensor",
        "sglang.srt.utils.patch_torch._rebuild_cuda_tensor_modified",
    }
)
_TENSORS = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})
_STORAGES = frozenset(
    {"torch.storage.TypedStorage", "torch.storage.UntypedStorage", "torch.UntypedStorage"}
)
_SIZE = ("torch", "Size")


@dataclass(frozen=True)
class SharedMemory:
    """A trainer's memory, as torch shared it once: it counts one use of it by us."""

    handle: bytes
    # from ``offset`` on, in bytes
    nbytes: int
    offset: int
    # where the trainer hears that it is not used any more
    counter_file: bytes
    counter: int
    # after it the memory holds what the trainer has written
    event: bytes
    waits_for_event: bool


@dataclass(frozen=True)
class GPUHandle:
    """A tensor in a trainer's memory. The trainer's number of the GPU says nothing here."""

    shape: tuple[int, ...]
    # these in elements
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    # None where it has no element
    memory: SharedMemory | None


# by a GPU's UUID
HandleOfEach = dict[str, GPUHandle]


def read_handles(content: bytes) -> list[HandleOfEach] | HandleOfEach:
    """Those of many tensors, or of one buffer.

    ``content`` may say anything, and vLLM unpickles it, which would run it. Here only data is
    made of it, and of what it names nothing is imported or called: see ``Unpickler``. What
    torch would take on trust, because torch has written it, is looked at: that a tensor lies
    within its memory, and that letting go of it writes to nothing else. Raises ``Refused``.
    """
    try:
        found = _Reader(BytesIO(content)).load()
        if isinstance(found, list):
            return [_of_each(item) for item in found]
        return _of_each(found)
    except Exception as error:
        raise Refused(
            f"ipc_handles_pickled holds no CUDA IPC handles: {describe(error)}"
        ) from error


class _Reader(Unpickler):
    """Names are texts here, but for torch's dtypes and what makes a ``torch.Size``."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _SIZE:
            return Function(torch.Size)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (named := f"{module}.{name}") in _REBUILD | _TENSORS | _STORAGES:
            return named
        raise ValueError(f"it names {named}, which no such handle needs")


def _of_each(found: Any) -> HandleOfEach:
    if not isinstance(found, dict):
        raise TypeError(f"a {type(found).__name__} says of no GPU what its handle is")
    return {gpu: _handle(value) for gpu, value in found.items()}


def _handle(value: Any) -> GPUHandle:
    """vLLM sends what torch rebuilds a tensor from; SkyRL, and vLLM before, by which function."""
    match value:
        case (str(rebuild), tuple(arguments)) if rebuild in _REBUILD:
            value = arguments
    match value:
        case (
            str(kind),
            tuple(shape),
            tuple(stride),
            offset,
            str(storage),
            torch.dtype() as dtype,
            int() | str(),
            memory,
            nbytes,
            *shared,
        ) if kind in _TENSORS and storage in _STORAGES and len(shared) == 6:
            _require_counts(*shape, *stride, offset, nbytes)
        case _:
            raise TypeError("it is not what torch rebuilds a tensor on a GPU from")
    if len(shape) != len(stride):
        raise ValueError(f"a shape of {len(shape)} dimensions has {len(stride)} strides")
    if 0 in shape or memory is None:
        if 0 not in shape:
            raise ValueError("a tensor with elements has no memory")
        return GPUHandle(tuple(shape), tuple(stride), 0, dtype, None)
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if last >= nbytes // dtype.itemsize:
        raise ValueError("a tensor is larger than its memory")
    return GPUHandle(tuple(shape), tuple(stride), offset, dtype, _memory(memory, nbytes, *shared))


def _memory(
    handle: Any,
    nbytes: int,
    offset: Any,
    _requires_grad: Any,
    counter_file: Any,
    counter: Any,
    event: Any,
    waits_for_event: Any,
) -> SharedMemory:
    _require_counts(offset, counter)
    if not isinstance(handle, bytes) or not isinstance(waits_for_event, bool):
        raise TypeError("it is not how torch shares memory of a GPU")
    if not isinstance(counter_file, bytes) or not _COUNTER_FILE.fullmatch(counter_file):
        raise ValueError("it counts uses of its memory in a file that is none of torch's")
    if counter >= _COUNTERS:
        raise ValueError(f"it counts uses of its memory at {counter}, of {_COUNTERS}")
    if not isinstance(event, bytes) or len(event) != _EVENT_BYTES:
        raise ValueError(f"an event's handle does not have {_EVENT_BYTES} bytes")
    return SharedMemory(handle, nbytes, offset, counter_file, counter, event, waits_for_event)


def _require_counts(*values: Any) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError("it has a size that is none")
