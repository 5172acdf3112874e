"""Unmaps shared memory without holding up the loop."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator

import torch

# ctypes, unlike ``mmap.madvise``, releases the interpreter during the call
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def release_pages(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``weights``, and unmap a tensor's pages when the next tensor is asked for.

    Torch unmaps a sender's whole memory when its last tensor goes, some 40 ms per GB, and holds
    the interpreter meanwhile. The loop needs the interpreter and would stand still. If the pages
    went before, tensor by tensor, nothing is left to unmap.

    Pages of shared memory come back at the next read: nothing is lost if somebody still holds the
    tensor. Other memory would be lost, and is left alone.
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
    # an expanded tensor counts more bytes than its storage has
    end = min(tensor.data_ptr() + tensor.nbytes, storage.data_ptr() + storage.nbytes())
    # the kernel refuses this for locked memory, and the pages stay
    _madvise(start, max(0, end - start), mmap.MADV_DONTNEED)
