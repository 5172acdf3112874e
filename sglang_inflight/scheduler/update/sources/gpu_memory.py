"""Reads tensors from a trainer's memory on this rank's GPU, by vLLM's handles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import accumulate

import torch
from sglang.srt.platforms import current_platform
from torch.multiprocessing import reductions

from sglang_inflight.errors import Refused
from sglang_inflight.messages import NEEDS_ONE_GPU, GPUMemorySource
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.gpu_handles import (
    GPUHandle,
    HandleOfEach,
    read_handles,
)
from sglang_inflight.scheduler.update.sources.gpu_sharing import SharedMemory, require_open
from sglang_inflight.scheduler.update.sources.layouts import Layout, read_layouts
from sglang_inflight.scheduler.update.sources.regular_file import describe
from sglang_inflight.scheduler.update.sources.weights import Weights
from sglang_inflight.scheduler.update.throttle.rate import RateLimit


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
        layouts = read_layouts(source.names, source.dtypes, source.shapes)
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
            tensor: torch.Tensor = reductions.rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
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
    for layout, end in zip(layouts, accumulate(own), strict=True):
        content = held[end - layout.nbytes : end]
        if (end - layout.nbytes) % layout.dtype.itemsize:
            # no tensor of this dtype can begin at this byte
            content = content.clone()
        yield layout.name, content.view(layout.dtype).view(layout.shape)
