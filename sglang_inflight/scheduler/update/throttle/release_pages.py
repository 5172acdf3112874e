"""Shared memory is let go of without holding up the loop."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator

import torch

# unlike a module of Python's, a call through ctypes gives up the interpreter
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def release_pages(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Hand on ``weights``; what one lies in is unmapped when the next is asked for.

    Torch unmaps a sender's whole memory at once, some 40 ms per GB, when the last tensor in it
    goes, and holds the interpreter meanwhile. The loop, which needs it, would stand still.
    Nothing is left to unmap then if the pages went before, tensor by tensor.

    Pages of shared memory come back when they are read again: nothing is lost if somebody still
    holds the tensor. Other memory would be, and is left alone.
    """
    for name, tensor in weights:
        yield name, tensor
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            continue
        if tensor.is_shared():  # type: ignore[no-untyped-call]
            _release(tensor)


def _release(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    # one that is expanded has more bytes than there are
    end = min(tensor.data_ptr() + tensor.nbytes, storage.data_ptr() + storage.nbytes())
    # the kernel leaves memory that is locked where it is, and so do we
    _madvise(start, max(0, end - start), mmap.MADV_DONTNEED)
