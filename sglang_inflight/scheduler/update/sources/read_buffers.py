"""Buffers for a checkpoint's tensors, read one after the other."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

# ctypes, unlike ``mmap.madvise``, releases the interpreter during the call
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


_MOST_BUFFERS = 3
_HUGE_PAGE = 2 << 20


class _Buffer:
    def __init__(self, nbytes: int) -> None:
        # whole huge pages, or the kernel may place the buffer where none fits
        self.capacity = capacity = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
        # takes no memory before it is written
        self._memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._used = 0
        self._references = sys.getrefcount(self._memory)

    @property
    def is_kept(self) -> bool:
        """True while a tensor lies in the buffer: its storage holds a reference."""
        return sys.getrefcount(self._memory) > self._references

    def take(self, nbytes: int) -> torch.Tensor:
        self._used = nbytes
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes)

    def give_back(self) -> None:
        """Return all memory without a tensor to the system."""
        used = self._used if self.is_kept else 0
        start = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        _madvise(address + start, max(0, self.capacity - start), mmap.MADV_DONTNEED)


class ReadBuffers:
    """Buffers for repeated use, unless somebody still holds a tensor in them.

    The kernel zeroes new memory page by page, in as much time as the reading takes. Used memory
    avoids this. Three buffers take turns: one is being read into, one is with the loader, and the
    loader may still hold the last tensor of a third. Some loaders gather tensors, to fuse or to
    sort them. Their buffers stay, and other tensors are read elsewhere. Loaders copy to a device:
    the copy has left the buffer when it returns.

    Only the staging thread takes buffers. Another thread reads into a buffer, and that reading
    keeps the buffer.
    """

    def __init__(self, largest: int) -> None:
        """``largest`` is the most bytes of one ``take``."""
        self._capacity = max(1, largest)
        self._buffers: list[_Buffer] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` unused bytes, one or more."""
        for buffer in self._buffers:
            if buffer.capacity >= nbytes and not buffer.is_kept:
                return buffer.take(nbytes)
        # the holder of a tensor frees the buffer
        buffer = _Buffer(self._capacity if len(self._buffers) < _MOST_BUFFERS else nbytes)
        self._buffers = [*self._buffers[1 - _MOST_BUFFERS :], buffer]
        return buffer.take(nbytes)

    def give_back(self) -> None:
        """Free all buffers. Torch would do so with the last tensor, holding the interpreter."""
        for buffer in self._buffers:
            buffer.give_back()
        self._buffers = []
