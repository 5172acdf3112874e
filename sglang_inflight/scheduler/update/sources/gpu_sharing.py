"""Checks the description of a GPU's shared memory, which torch itself would trust.

Two facts are checked: a tensor lies within its memory, and the counter of the memory's users lies
in a file of torch's. Torch writes this counter at the memory's release.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch

# size of CUDA's event handle
_EVENT_BYTES = 64
# number of counters in torch's file. Torch also writes a counter beyond the file's end, when the
# memory is released.
_COUNTERS = 10_000
# torch names the file by its process and two numbers
_COUNTER_FILE = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+", re.ASCII)


@dataclass(frozen=True)
class SharedMemory:
    """A trainer's memory, shared once by torch, with one use counted for this process."""

    handle: bytes
    # length from ``offset`` on, in bytes
    nbytes: int
    offset: int
    # the trainer reads here whether the memory is still in use
    counter_file: bytes
    counter: int
    # after this event the memory holds the trainer's data
    event: bytes
    waits_for_event: bool


@dataclass(frozen=True)
class GPUHandle:
    """A tensor in a trainer's memory. The trainer's number of the GPU is not used."""

    shape: tuple[int, ...]
    # stride and offset in elements
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    # None for a tensor without elements
    memory: SharedMemory | None


def read_tensor(arguments: Any, kinds: Container[Any], storages: Container[Any]) -> GPUHandle:
    """Return what torch's arguments for a tensor on a GPU say. Raise if they are not torch's.

    ``kinds`` and ``storages``: the classes that they may name.
    """
    match arguments:
        case (
            kind,
            tuple(shape),
            tuple(stride),
            offset,
            storage,
            torch.dtype() as dtype,
            int() | str(),
            memory,
            nbytes,
            *shared,
        ) if kind in kinds and storage in storages and len(shared) == 6:
            pass
        case _:
            raise TypeError("its arguments are not torch's for a tensor on a GPU")
    _require_counts(*shape, *stride, offset, nbytes)
    if len(shape) != len(stride):
        raise ValueError(f"a shape of {len(shape)} dimensions has {len(stride)} strides")
    # torch opens the memory even for a tensor without elements
    shares = None if memory is None else _read_memory(memory, nbytes, *shared)
    if 0 in shape:
        return GPUHandle(tuple(shape), tuple(stride), 0, dtype, None)
    if shares is None:
        raise ValueError("a tensor with elements has no memory")
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if last >= nbytes // dtype.itemsize:
        raise ValueError("a tensor is larger than its memory")
    return GPUHandle(tuple(shape), tuple(stride), offset, dtype, shares)


def _read_memory(
    handle: Any,
    nbytes: int,
    offset: Any,
    _requires_grad: Any,
    counter_file: Any,
    counter: Any,
    event: Any,
    waits_for_event: Any,
) -> SharedMemory:
    """Return torch's description of shared memory. Raise an error if it is not torch's."""
    _require_counts(nbytes, offset, counter)
    if not isinstance(handle, bytes) or not isinstance(waits_for_event, bool):
        raise TypeError("its description of the memory is not torch's for a GPU")
    if not isinstance(counter_file, bytes) or not _COUNTER_FILE.fullmatch(counter_file):
        raise ValueError("it counts uses of its memory in a file that is not one of torch's")
    if counter >= _COUNTERS:
        raise ValueError(f"it counts uses of its memory at {counter}, of {_COUNTERS}")
    if not isinstance(event, bytes) or len(event) != _EVENT_BYTES:
        raise ValueError(f"an event's handle does not have {_EVENT_BYTES} bytes")
    return SharedMemory(handle, nbytes, offset, counter_file, counter, event, waits_for_event)


def require_open(address: int, nbytes: int) -> None:
    """Raise if ``nbytes`` from ``address`` on are not all opened in this process.

    A kernel that reads other memory ends every use of the GPU by this process. The sender states
    the size, so the driver is asked for it. Torch's expandable segments are opened in pieces, one
    after the other.
    """
    end = address + nbytes
    while address < end:
        begin, size = address_range(address)
        if not begin <= address < begin + size:
            raise ValueError("the driver knows of no memory there")
        address = begin + size


def address_range(address: int) -> tuple[int, int]:
    """Return start and size of the allocation around ``address``. Raise if there is none."""
    # imported here: the driver exists once it has opened the memory
    from cuda.bindings import driver

    error, begin, size = driver.cuMemGetAddressRange(address)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise ValueError(f"it is larger than what was shared ({error.name})")
    return int(begin), int(size)


def _require_counts(*values: Any) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError("a size, stride, offset or counter is not an integer from 0 on")
