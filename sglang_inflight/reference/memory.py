"""Memory that goes and comes back where there is no accelerator, with ``--enable-memory-saver``.

SGLang's memory saver takes a device's pages away from behind its addresses. Here the kernel
does: the pages inside a tensor's storage are given back to it (``MADV_DONTNEED``), and the
addresses stay. Nothing may touch what is away. On CUDA that is an illegal access, which ends the
process, and so it is here: the pages are protected, so that whoever touches them is found.
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

from sglang_inflight.storages import distinct_storages

_LIBC = ctypes.CDLL(None, use_errno=True)
# of <sys/mman.h>; the module ``mmap`` has no name for it
_PROT_NONE = 0
_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class PageSaver(torch_memory_saver_adapter.TorchMemorySaverAdapter):
    """What SGLang asks of a memory saver, for memory of the host.

    It does not note what is allocated in a region, but asks for a tag's tensors when they are to
    go (``look_in``), because a commit may have put others in their place. What comes back is
    zeros, also with ``--enable-weights-cpu-backup``: the scheduler keeps a copy then. The first and
    the last page of a storage may be shared with others: they stay.

    Only the scheduler's thread calls ``pause`` and ``resume``.
    """

    def __init__(self) -> None:
        self._find: Callable[[str], Iterable[torch.Tensor]] = _nothing
        # by tag; held, so that nobody gets their addresses
        self._away: dict[str, list[torch.UntypedStorage]] = {}

    def look_in(self, find: Callable[[str], Iterable[torch.Tensor]]) -> None:
        """``find`` gives the tensors of a tag."""
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

    # ---- what only a device needs ----------------------------------------------------

    def configure_subprocess(self) -> AbstractContextManager[None]:
        return nullcontext()

    def region(self, tag: str, enable_cpu_backup: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def cuda_graph(self, **kwargs: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def disable(self) -> AbstractContextManager[None]:
        return nullcontext()


def save_pages() -> None:
    """From now on ``--enable-memory-saver`` means this one."""
    torch_memory_saver_adapter._TorchMemorySaverAdapterReal = PageSaver
    # where torch_memory_saver is not installed nobody misses it
    torch_memory_saver_adapter.import_error = None


def _nothing(tag: str) -> Iterable[torch.Tensor]:
    return ()


def _pages_inside(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Address and size of the pages that are the storage's alone."""
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    return first, max(0, end - first)


def _call(name: str, start: int, size: int, argument: int) -> None:
    result = getattr(_LIBC, name)(ctypes.c_void_p(start), ctypes.c_size_t(size), argument)
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} of {size} bytes: {os.strerror(number)}")
