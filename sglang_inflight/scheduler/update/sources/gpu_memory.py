"""Tensors in a trainer's memory on the GPU of this rank, found by vLLM's handles to it."""

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
    """Memory of trainers that is open on this rank. The staging thread's alone.

    Tensors are views of the trainer's memory, until a loader has copied them on the staging
    stream. The call that brought them is answered when that stream has finished, and the
    trainer may write to its memory from then on.

    Torch counts one use of memory for each time that it is shared, and vLLM's trainer shares its
    buffer once, for many calls. Opened and closed in each of them it would be counted down too
    often, and its trainer could never free it. So the buffer stays open from call to call, until
    another comes or the update takes no more. Whoever closes memory waits for the stream that is
    current then (torch does), which is why only the staging thread does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # that of many calls
        self._kept: tuple[SharedMemory, torch.Tensor] | None = None

    def let_go(self) -> None:
        """No call of the update will ask for the buffer again."""
        self._kept = None

    def read(
        self, source: GPUMemorySource, check: Callable[[], None], rate_limit: RateLimit
    ) -> Weights:
        """Yield the tensors that ``source`` says of.

        A trainer may be stopped or gone, so an ``AbandonableThread`` opens its memory;
        ``check`` raises when it is time to give up. Raises ``Refused``.
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
    """One for each of ``layouts``, whose tensor it is."""
    if len(handles) != len(layouts):
        raise Refused(f"ipc_handles has {len(handles)} handles for {len(layouts)} names")
    own = [own_handle(each, gpu) for each in handles]
    for handle, layout in zip(own, layouts, strict=True):
        if (handle.dtype, list(handle.shape)) != (layout.dtype, layout.shape):
            raise Refused(
                f"{layout.name!r} is said to be a {layout.dtype} of shape {layout.shape}, and its "
                f"handle is to a {handle.dtype} of shape {list(handle.shape)}"
            )
    return own


def cut(buffer: torch.Tensor, layouts: list[Layout], sizes: list[int] | None) -> Weights:
    """The tensors that lie in ``buffer``, one after the other.

    ``sizes``, where the trainer says them, must be those of its tensors, in bytes.
    """
    own = [layout.nbytes for layout in layouts]
    if sizes is not None and sizes != own:
        raise Refused("tensor_sizes are not those of tensors of these shapes and dtypes")
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
            # where no tensor of its dtype can begin
            content = content.clone()
        yield layout.name, content.view(layout.dtype).view(layout.shape)
