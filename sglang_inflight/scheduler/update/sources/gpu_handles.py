"""Handles to a trainer's memory on a GPU, as vLLM's trainers pickle them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch

from sglang_inflight.errors import Refused
from sglang_inflight.scheduler.update.sources.gpu_sharing import (
    SharedMemory,
    has_memory,
    read_memory,
)
from sglang_inflight.scheduler.update.sources.regular_file import describe
from sglang_inflight.scheduler.update.sources.unpickling import Function, Unpickler

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


def read_handles(
    content: bytes, rest: Callable[[], None] = lambda: None
) -> list[HandleOfEach] | HandleOfEach:
    """The handles of many tensors, or of one buffer.

    ``rest`` is called now and then, as in ``unpickle``.

    ``content`` may say anything, and vLLM unpickles it, which would run it. Here only data is
    made of it, and of what it names nothing is imported or called: see ``Unpickler``. What
    torch would take on trust, because torch has written it, is looked at: that a tensor lies
    within its memory, and that letting go of it writes to nothing else. Raises ``Refused``.
    """
    try:
        found = _Reader(BytesIO(content), rest).load()
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
            pass
        case _:
            raise TypeError("it is not what torch rebuilds a tensor on a GPU from")
    if not has_memory(shape, stride, offset, dtype, memory, nbytes):
        return GPUHandle(tuple(shape), tuple(stride), 0, dtype, None)
    shares = read_memory(memory, nbytes, *shared)
    return GPUHandle(tuple(shape), tuple(stride), offset, dtype, shares)
