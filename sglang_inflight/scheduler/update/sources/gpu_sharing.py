"""A GPU's memory that somebody shares: what torch would take on trust is looked at.

Torch has written it where nobody else has: that a tensor lies within its memory, and where it
is counted who uses that, which is written to when it is let go of.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# of CUDA's own handles, in bytes
_EVENT_BYTES = 64
# of the file in which torch counts who uses memory: a place beyond its end is written to all the
# same, when the memory is let go of
_COUNTERS = 10_000
# torch makes a file's name of its process and two numbers
_COUNTER_FILE = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+", re.ASCII)


@dataclass(frozen=True)
class SharedMemory:
    """A trainer's memory, as torch shared it once: it counts one use of it by us."""

    handle: bytes
    # from ``offset`` on, in bytes
    nbytes: int
    offset: int
    # where the trainer hears that it is not used any more
    counter_file: bytes
    counter: int
    # after it the memory holds what the trainer has written
    event: bytes
    waits_for_event: bool


def has_memory(
    shape: Sequence[Any],
    stride: Sequence[Any],
    offset: Any,
    dtype: torch.dtype,
    memory: Any,
    nbytes: Any,
) -> bool:
    """Whether a tensor has an element. Raises where one does not lie within ``memory``."""
    _require_counts(*shape, *stride, offset, nbytes)
    if len(shape) != len(stride):
        raise ValueError(f"a shape of {len(shape)} dimensions has {len(stride)} strides")
    if 0 in shape:
        return False
    if memory is None:
        raise ValueError("a tensor with elements has no memory")
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if last >= nbytes // dtype.itemsize:
        raise ValueError("a tensor is larger than its memory")
    return True


def read_memory(
    handle: Any,
    nbytes: int,
    offset: Any,
    _requires_grad: Any,
    counter_file: Any,
    counter: Any,
    event: Any,
    waits_for_event: Any,
) -> SharedMemory:
    """As torch shares it. Raises what says otherwise."""
    _require_counts(nbytes, offset, counter)
    if not isinstance(handle, bytes) or not isinstance(waits_for_event, bool):
        raise TypeError("it is not how torch shares memory of a GPU")
    if not isinstance(counter_file, bytes) or not _COUNTER_FILE.fullmatch(counter_file):
        raise ValueError("it counts uses of its memory in a file that is none of torch's")
    if counter >= _COUNTERS:
        raise ValueError(f"it counts uses of its memory at {counter}, of {_COUNTERS}")
    if not isinstance(event, bytes) or len(event) != _EVENT_BYTES:
        raise ValueError(f"an event's handle does not have {_EVENT_BYTES} bytes")
    return SharedMemory(handle, nbytes, offset, counter_file, counter, event, waits_for_event)


def require_open(address: int, nbytes: int) -> None:
    """Raise where a byte from ``address`` on is no memory that this process has opened.

    A kernel that reads one ends every use of the GPU by this process. What is opened is the
    driver's word; how large it is, until here, that of whoever shared it. Memory of torch's
    expandable segments is open in pieces, one after the other.
    """
    end = address + nbytes
    while address < end:
        begin, size = address_range(address)
        if not begin <= address < begin + size:
            raise ValueError("the driver knows of no memory there")
        address = begin + size


def address_range(address: int) -> tuple[int, int]:
    """Where the allocation around ``address`` begins, and its bytes. Raises where there is none."""
    # there is a driver by now: it has opened the memory
    from cuda.bindings import driver

    error, begin, size = driver.cuMemGetAddressRange(address)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise ValueError(f"it is larger than what was shared ({error.name})")
    return int(begin), int(size)


def _require_counts(*values: Any) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError("it has a size that is none")
