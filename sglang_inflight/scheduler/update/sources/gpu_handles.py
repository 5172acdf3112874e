"""Reads the handles to a trainer's GPU memory, as pickled by vLLM's trainers."""

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

# torch's function that rebuilds such a tensor, and SGLang's replacement in trainers with SGLang
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
    """A tensor in a trainer's memory. The trainer's number of the GPU is not used."""

    shape: tuple[int, ...]
    # stride and offset in elements
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    # None for a tensor without elements
    memory: SharedMemory | None


# by a GPU's UUID
HandleOfEach = dict[str, GPUHandle]


def read_handles(
    content: bytes, rest: Callable[[], None] = lambda: None
) -> list[HandleOfEach] | HandleOfEach:
    """Return the handles of many tensors, or of one buffer.

    ``rest`` is called now and then, as in ``unpickle``.

    ``content`` may hold anything, and vLLM's unpickling would run it. This function makes only data
    of it, and neither imports nor calls a named global: see ``Unpickler``. Torch would trust the
    description, so it is checked: a tensor lies within its memory, and its release writes to
    nothing else. Raise ``Refused`` otherwise.
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
    """Reads globals as texts, except torch's dtypes and ``torch.Size``."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _SIZE:
            return Function(torch.Size)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (named := f"{module}.{name}") in _REBUILD | _TENSORS | _STORAGES:
            return named
        raise ValueError(f"it names {named}, which is not allowed in a handle")


def _of_each(found: Any) -> HandleOfEach:
    if not isinstance(found, dict):
        raise TypeError(f"expected a dict of handles by GPU, got a {type(found).__name__}")
    return {gpu: _handle(value) for gpu, value in found.items()}


def _handle(value: Any) -> GPUHandle:
    """Read torch's arguments for a tensor. SkyRL and older vLLM send the function's name too."""
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
            raise TypeError("its arguments are not torch's for a tensor on a GPU")
    if not has_memory(shape, stride, offset, dtype, memory, nbytes):
        return GPUHandle(tuple(shape), tuple(stride), 0, dtype, None)
    shares = read_memory(memory, nbytes, *shared)
    return GPUHandle(tuple(shape), tuple(stride), offset, dtype, shares)
