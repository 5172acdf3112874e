"""Huge pages for a process that forks: its page tables get an entry for 2 MiB, not one for 4 KiB.

A process with SGLang imported has written nearly a gigabyte. A fork copies its page tables and the
fork's end frees them, and each process of a server takes three forks. With small pages that was
half of what a server's start costs.
"""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

HUGE = 2 << 20  # bytes
# Python's mmap does not have it
_MADV_COLLAPSE = 25
# a kernel before Linux 6.1, memory that takes no huge page, and a lack of free ones
_WITHOUT = {errno.EINVAL, errno.ENOMEM, errno.EAGAIN, errno.EBUSY}


def make_pages_huge() -> None:
    """Put what this process has written into huge pages, where the kernel can.

    A page stays shared with the process's forks. A fork that writes to it copies 4 KiB of it.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, mode, _, _, inode, *_ = line.split()
        # a file's pages are the kernel's to keep
        if mode != "rw-p" or inode != "0":
            continue
        begin, end = (int(bound, 16) for bound in bounds.split("-"))
        begin, end = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
        if begin >= end:
            continue
        if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_COLLAPSE):
            error = ctypes.get_errno()
            if error not in _WITHOUT:
                raise OSError(error, f"madvise: {bounds}")
