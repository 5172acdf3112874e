"""Parts of SGLang that need an accelerator, made to work with host memory alone.

**Hierarchical cache**, with ``--hicache-io-backend direct``: its second tier is host memory. SGLang
pins it and copies with its own kernels. Here both tiers are host memory: nothing is pinned, and
torch copies.

**Captured routes**, with ``--enable-return-routed-experts``: SGLang keeps them in host memory, and
pins it. Here the memory is not pinned.

**LoRA adapters**, with ``--lora-backend torch_native``: SGLang pins memory before copying it to a
device. Without a device torch refuses to pin.

**KV transfer** from a prefill server to a decode server: mooncake transfers KV over TCP. SGLang's
prefill side copies page indices into pinned memory, and waits for CUDA's events. Without a device
the indices are complete at once.

**Release and resume of memory**, with ``--enable-memory-saver``: SGLang's memory saver unmaps a
device's pages and keeps their addresses. Here the pages inside a tensor's storage go back to the
kernel (``MADV_DONTNEED``), and the addresses stay. Touching released memory ends the process, as an
illegal access on CUDA does: the pages are protected, to find such bugs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from sglang.srt.utils import torch_memory_saver_adapter

from sglang_inflight.sglang_types import get_disagg, get_exec, get_lora, get_memory
from sglang_inflight.storages import distinct_storages

# early sending of a prefix needs an event; without it all KV is sent together
EARLY_SEND = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
# a sender without this attribute counts as false
PINNED_INDICES = "supports_host_tensor_indices"
_LIBC = ctypes.CDLL(None, use_errno=True)
# from <sys/mman.h>; Python's mmap lacks it
_PROT_NONE = 0
_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


def keep_host_memory_unpinned() -> None:
    """Patch SGLang's host tier, and its memory for routes.

    Call after the model is loaded, before its cache is created.
    """
    has_host_tier = get_memory().enable_hierarchical_cache
    if not has_host_tier and not get_exec().features.enable_return_routed_experts:
        return
    from sglang.srt.mem_cache.pool_host import common, mha

    allocate: Any = _allocate
    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    if has_host_tier:
        mha.transfer_kv_direct = _copy


def _allocate(dims: tuple[int, ...], *, dtype: torch.dtype, device: str, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype, device=device)


def _copy(
    *,
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy tokens between tiers. Indices count tokens, whatever the page size."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


class _WithoutPinning:
    """Stand-in for ``torch`` in SGLang's modules, ignoring ``pin_memory``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)

    def zeros(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def serve_adapters_without_pinning() -> None:
    """Patch SGLang's LoRA modules. Call after the model is loaded, before its adapters."""
    if not get_lora().enable_lora:
        return
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    patched: Any = _WithoutPinning()
    layers.torch = torch_backend.torch = patched
    torch.Tensor.pin_memory = lambda tensor, *args: tensor  # type: ignore[method-assign]


def send_without_events() -> None:
    """Patch SGLang's prefill side. Call after the model is loaded, before any request."""
    disagg = get_disagg()
    if disagg.disaggregation_mode != "prefill":
        return
    os.environ.setdefault(EARLY_SEND, "false")
    if disagg.disaggregation_transfer_backend == "mooncake":
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

        setattr(MooncakeKVSender, PINNED_INDICES, False)


class PageSaver(torch_memory_saver_adapter.TorchMemorySaverAdapter):
    """SGLang's memory saver for host memory.

    The saver does not track allocations in a region. At a release it asks for a tag's tensors
    (``look_in``), because a commit may have replaced them. Resumed memory is zeros, also with
    ``--enable-weights-cpu-backup``: the scheduler keeps a copy itself. The first and the last page
    of a storage stay, because other objects may share them.

    Only the scheduler's thread calls ``pause`` and ``resume``.
    """

    def __init__(self) -> None:
        self._find: Callable[[str], Iterable[torch.Tensor]] = _nothing
        # tag -> released storages, kept alive so that no allocation reuses their addresses
        self._away: dict[str, list[torch.UntypedStorage]] = {}

    def look_in(self, find: Callable[[str], Iterable[torch.Tensor]]) -> None:
        """Use ``find`` to get a tag's tensors."""
        self._find = find

    def pause(self, tag: str) -> None:
        storages = distinct_storages(self._find(tag))
        self._away[tag] = storages
        for start, size in map(_pages_inside, storages):
            if size:
                _call("madvise", start, size, mmap.MADV_DONTNEED)
                _call("mprotect", start, size, _PROT_NONE)

    def resume(self, tag: str) -> None:
        for start, size in map(_pages_inside, self._away.pop(tag)):
            if size:
                _call("mprotect", start, size, _READ_AND_WRITE)

    @property
    def enabled(self) -> bool:
        return True

    # ---- only for devices ------------------------------------------------------------

    def configure_subprocess(self) -> AbstractContextManager[None]:
        return nullcontext()

    def region(self, tag: str, enable_cpu_backup: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def cuda_graph(self, **kwargs: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def disable(self) -> AbstractContextManager[None]:
        return nullcontext()


def save_pages() -> None:
    """Make ``--enable-memory-saver`` use ``PageSaver``."""
    adapter: Any = torch_memory_saver_adapter
    adapter._TorchMemorySaverAdapterReal = PageSaver
    # SGLang would refuse the flag if torch_memory_saver is not installed
    adapter.import_error = None


def _nothing(tag: str) -> Iterable[torch.Tensor]:
    return ()


def _pages_inside(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return address and size of the pages wholly inside the storage."""
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    return first, max(0, end - first)


def _call(name: str, start: int, size: int, argument: int) -> None:
    result = getattr(_LIBC, name)(ctypes.c_void_p(start), ctypes.c_size_t(size), argument)
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} of {size} bytes: {os.strerror(number)}")
