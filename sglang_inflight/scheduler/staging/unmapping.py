"""Mapped files and shared memory are let go of without holding up the loop."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

# unlike a module of Python's, a call through ctypes gives up the interpreter
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def unmapping(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Hand on ``weights``; what one lies in is unmapped when the next is asked for.

    Torch unmaps a whole file at once, some 40 ms per GB, when the last tensor in it goes, and
    holds the interpreter meanwhile. The loop, which needs it, would stand still. Nothing is left
    to unmap then if the pages went before, tensor by tensor.

    Pages of a file, which shared memory is too, come back when they are read again: nothing is
    lost if somebody still holds the tensor. Other memory would be, and is left alone.
    """
    near = _Mapping(range(0), is_file=False, keeps=None)
    for name, tensor in weights:
        yield name, tensor
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            continue
        is_shared = tensor.is_shared()  # type: ignore[no-untyped-call]
        if not is_shared and tensor.data_ptr() not in near.addresses:
            near = _find_mapping(tensor)
        if is_shared or near.is_file:
            _unmap(tensor)


class _Mapping(NamedTuple):
    addresses: range
    is_file: bool
    # so that nothing else is ever at these addresses
    keeps: torch.Tensor | None


def _find_mapping(tensor: torch.Tensor) -> _Mapping:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _permissions, _offset, _device, inode, *_ = line.split(maxsplit=5)
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= tensor.data_ptr() < end:
            return _Mapping(range(start, end), is_file=inode != "0", keeps=tensor)
    # of a tensor without elements
    return _Mapping(range(0), is_file=False, keeps=None)


def _unmap(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    # one that is expanded has more bytes than there are
    end = min(tensor.data_ptr() + tensor.nbytes, storage.data_ptr() + storage.nbytes())
    # the kernel leaves memory that is locked where it is, and so do we
    _madvise(start, max(0, end - start), mmap.MADV_DONTNEED)
