"""Reads tensors from a trainer's memory on this rank's GPU, by vLLM's handles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from io import BytesIO
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.platforms import current_platform
from torch.multiprocessing import reductions

from sglang_inflight.messages import NEEDS_ONE_GPU, GPUMemorySource
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.batches import Packed, Weights
from sglang_inflight.scheduler.update.sources.call_layouts import CallLayout, Layout
from sglang_inflight.scheduler.update.sources.gpu_sharing import (
    GPUHandle,
    SharedMemory,
    read_tensor,
    require_open,
)
from sglang_inflight.scheduler.update.sources.unpickling import Function, Unpickler
from sglang_inflight.vocabulary.errors import Refused, describe

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


# handles by a GPU's UUID
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
    return read_tensor(value, _TENSORS, _STORAGES)


class GPUMemory:
    """The memory of trainers open on this rank. Only the staging thread touches this object.

    Tensors are views of the trainer's memory, until a loader has copied them on the staging
    stream. A call is answered when that stream has finished. From then on the trainer may write to
    its memory.

    Torch counts one use for each sharing of memory, but vLLM's trainer shares its buffer once for
    many calls. Opened and closed in each call, the buffer would be counted down too often, and its
    trainer could never free it. So the buffer stays open until another buffer comes or the update
    takes no more tensors. Closing memory waits for the current stream (in torch), so only the
    staging thread closes memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # the buffer of many calls
        self._kept: tuple[SharedMemory, torch.Tensor] | None = None

    def stop_reading(self) -> None:
        """Close the buffer: no call of the update will need it again."""
        self._kept = None

    def read(
        self, source: GPUMemorySource, check: Callable[[], None], rate_limit: RateLimit
    ) -> Weights:
        """Yield the tensors described by ``source``.

        A trainer may be stopped or gone, so an ``AbandonableThread`` opens its memory;
        ``check`` raises when it is time to give up. Raise ``Refused`` for wrong handles.
        """
        if self._device.type != "cuda":
            raise Refused(NEEDS_ONE_GPU)
        layouts = [*CallLayout.read(source.names, source.dtypes, source.shapes).tensors()]
        gpu = current_platform.get_device_uuid(self._device.index or 0)
        rest = partial(rate_limit.for_another_thread().spend, 0)
        with AbandonableThread(check, self._device) as thread:
            handles = thread.do(partial(read_handles, source.handles, rest))
            if isinstance(handles, list):
                own = own_handles(handles, gpu, layouts)
                tensors = thread.do(lambda: [self._open(handle) for handle in own])
                tensors.reverse()
                for layout in layouts:
                    yield layout.name, tensors.pop()
                return
            handle = own_handle(handles, gpu)
            buffer = thread.do(partial(self._open_again, handle, keep=source.keeps_buffer))
        with closing(cut(buffer, layouts, source.sizes)) as views:
            yield from views

    def _open_again(self, handle: GPUHandle, *, keep: bool) -> torch.Tensor:
        if self._kept is not None and self._kept[0] == handle.memory:
            return self._kept[1]
        self._kept = None
        tensor = self._open(handle)
        if keep and handle.memory is not None:
            self._kept = handle.memory, tensor
        return tensor

    def _open(self, handle: GPUHandle) -> torch.Tensor:
        memory = handle.memory
        if memory is None:
            return torch.empty(handle.shape, dtype=handle.dtype, device=self._device)
        try:
            tensor: torch.Tensor = reductions.rebuild_cuda_tensor(
                torch.Tensor,
                torch.Size(handle.shape),
                handle.stride,
                handle.offset,
                torch.storage.TypedStorage,
                handle.dtype,
                self._device.index or 0,
                memory.handle,
                memory.nbytes,
                memory.offset,
                False,
                memory.counter_file,
                memory.counter,
                memory.event,
                memory.waits_for_event,
            )
            require_open(tensor.untyped_storage().data_ptr(), memory.nbytes)
        except Exception as error:
            raise Refused(
                f"a trainer's memory cannot be opened: {describe(error)}. {NEEDS_ONE_GPU}"
            ) from error
        return tensor


def own_handle(handles: HandleOfEach, gpu: str) -> GPUHandle:
    if gpu not in handles:
        there = ", ".join(handles) or "none"
        raise Refused(
            f"ipc_handles has no handle for this rank's GPU {gpu!r} (there is {there}). "
            f"{NEEDS_ONE_GPU}"
        )
    return handles[gpu]


def own_handles(handles: list[HandleOfEach], gpu: str, layouts: list[Layout]) -> list[GPUHandle]:
    """Return this GPU's handle for each of ``layouts``, checked against the layout."""
    if len(handles) != len(layouts):
        raise Refused(f"ipc_handles has {len(handles)} handles for {len(layouts)} names")
    own = [own_handle(each, gpu) for each in handles]
    for handle, layout in zip(own, layouts, strict=True):
        if (handle.dtype, list(handle.shape)) != (layout.dtype, layout.shape):
            raise Refused(
                f"{layout.name!r} is announced as a {layout.dtype} of shape {layout.shape}, but "
                f"its handle is to a {handle.dtype} of shape {list(handle.shape)}"
            )
    return own


def cut(buffer: torch.Tensor, layouts: list[Layout], sizes: list[int] | None) -> Weights:
    """Yield the tensors in ``buffer``, one after the other.

    ``sizes``, if sent by the trainer, must be its tensors' sizes in bytes.
    """
    own = [layout.nbytes for layout in layouts]
    if sizes is not None and sizes != own:
        raise Refused(f"tensor_sizes {sizes[:8]} do not fit the shapes and dtypes: {own[:8]}")
    if not buffer.is_contiguous():
        raise Refused("the buffer that holds the tensors has gaps")
    held = buffer.flatten().view(torch.uint8)
    if sum(own) > held.numel():
        raise Refused(
            f"the tensors have {sum(own)} bytes, and the buffer that holds them {held.numel()}"
        )
    packed = Packed(held)
    for layout, end in zip(layouts, accumulate(own), strict=True):
        start = end - layout.nbytes
        yield layout.name, packed.view_or_copy(start, end, layout.dtype, layout.shape)
