"""Memory that a checkpoint's tensors are read into, one after the other."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

# unlike a module of Python's, a call through ctypes gives up the interpreter
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


_MOST_BUFFERS = 3
_HUGE_PAGE = 2 << 20


class _Buffer:
    def __init__(self, nbytes: int) -> None:
        # or the kernel would put it where no huge page fits
        self.capacity = capacity = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
        # nothing of it is memory before it is written
        self._memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._used = 0
        self._references = sys.getrefcount(self._memory)

    @property
    def is_kept(self) -> bool:
        """Whether a tensor in it is left: each holds a reference, by way of its storage."""
        return sys.getrefcount(self._memory) > self._references

    def take(self, nbytes: int) -> torch.Tensor:
        self._used = nbytes
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes)

    def give_back(self) -> None:
        """To the system, all that no tensor lies in."""
        used = self._used if self.is_kept else 0
        start = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        _madvise(address + start, max(0, self.capacity - start), mmap.MADV_DONTNEED)


class ReadBuffers:
    """Used again and again, unless somebody still holds a tensor that lies in them.

    Memory that was in use before need not be zeroed by the kernel page by page, which takes as
    long as the reading. Three buffers take turns: one is read into, one is what the loader has
    been given, and of one before it may still hold the last tensor. Some loaders gather
    tensors, to fuse them or to sort them. Theirs stay, and others are read elsewhere.
    A copy to a device has left the memory when it returns, which is what loaders make.

    Only the staging thread takes buffers. What another one reads into is kept by that reading.
    """

    def __init__(self, largest: int) -> None:
        """``largest`` is how many bytes are taken at most."""
        self._capacity = max(1, largest)
        self._buffers: list[_Buffer] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """So many bytes, one or more, that nobody uses."""
        for buffer in self._buffers:
            if buffer.capacity >= nbytes and not buffer.is_kept:
                return buffer.take(nbytes)
        # what is kept is its keeper's, who frees it
        buffer = _Buffer(self._capacity if len(self._buffers) < _MOST_BUFFERS else nbytes)
        self._buffers = [*self._buffers[1 - _MOST_BUFFERS :], buffer]
        return buffer.take(nbytes)

    def give_back(self) -> None:
        """Torch would do so when the last tensor goes, and hold the interpreter meanwhile."""
        for buffer in self._buffers:
            buffer.give_back()
        self._buffers = []
