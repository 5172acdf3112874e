"""Memory that a loader may address and that takes no room until it is written.

A loader needs a tensor for each weight: it cuts views from it, and copies into these. Most copies
are staged and not made (``loaded_model.py``), so most of this memory is never touched. Linux gives
an anonymous mapping its pages at their first write.
"""

from __future__ import annotations

import functools
import mmap
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from sglang_inflight.storages import span_of

_PAGE = mmap.PAGESIZE
_PIECE = 64 << 20
# named by Python from 3.12 on
_NO_RESERVE = 0x4000
# bits 62 and 63 of an entry in /proc/self/pagemap: the page is in memory, or in swap
_PRESENT_OR_SWAPPED = -1 << 62


class Handle:
    """The address range of one weight's staged copy, in the host's memory."""

    def __init__(self, like: torch.Tensor, *, is_watched: bool = True) -> None:
        """``like`` gives shape, strides and dtype.

        ``is_watched``: ``is_touched`` is asked. Otherwise the memory may have huge pages, because a
        whole checkpoint is written into it.
        """
        count = span_of(like)
        self._nbytes = count * like.element_size()
        self._memory = mmap.mmap(
            -1,
            max(like.element_size(), self._nbytes),
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE,
        )
        # a huge page would reach into the neighbours' ranges, and they would look written
        huge_pages = mmap.MADV_NOHUGEPAGE if is_watched else mmap.MADV_HUGEPAGE
        with suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(huge_pages)
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=max(1, count))
        self.tensor = flat[:count].as_strided(like.shape, like.stride())

    def release(self) -> None:
        """Give the pages back. The next read sees zeros."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def is_touched(self) -> bool:
        """Return whether memory was written since the last release.

        Zeros may not count where the system does not say which pages were written (gVisor).
        """
        if not _tells_written_pages():
            return self._holds_something()
        return _are_pages_written(self.tensor.data_ptr(), self._nbytes)

    def _holds_something(self) -> bool:
        found = np.frombuffer(self._memory, dtype=np.uint8)
        holds = any(found[at : at + _PIECE].any() for at in range(0, len(found), _PIECE))
        # reading may take pages there
        self.release()
        return holds


def _are_pages_written(address: int, nbytes: int) -> bool:
    first, pages = address // _PAGE, -(-nbytes // _PAGE)
    with Path("/proc/self/pagemap").open("rb") as entries:
        entries.seek(8 * first)
        found = np.frombuffer(entries.read(8 * pages), dtype=np.int64)
    return bool((found & _PRESENT_OR_SWAPPED).any())


@functools.cache
def _tells_written_pages() -> bool:
    """Return whether this system tells which pages were written."""
    memory = mmap.mmap(-1, _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    row = np.frombuffer(memory, dtype=np.uint8)
    try:
        before = _are_pages_written(row.ctypes.data, _PAGE)
        row[0] = 1
        return not before and _are_pages_written(row.ctypes.data, _PAGE)
    except OSError:
        return False
