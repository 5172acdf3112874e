"""A card's driver made of the host's memory: pages change places under addresses, for real.

Handles are files in memory, and an address range is one of this process. Calls that the driver's
documentation forbids return an error, and a touch of memory without access ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.remapping import ON_DEVICE, PINNED, PROTOTYPES, READ_AND_WRITE, RECOMMENDED

GRANULARITY = 1 << 16
INVALID_VALUE, OUT_OF_MEMORY = 1, 2
_NAMES = {INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE", OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY"}

_FIXED = 0x10
_NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostPages:
    """The functions of a driver's library, through ctypes, and what they were called with."""

    def __init__(self, memory: int = 1 << 40) -> None:
        """``memory``: the bytes that handles may have together."""
        self._left = memory
        # each call: its name without "cuMem", and its sizes or addresses
        self.calls: list[tuple[Any, ...]] = []
        # size of each handle, of each range, and of each mapping by its address
        self.handles: dict[int, int] = {}
        self.ranges: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self._wider: dict[int, tuple[int, int]] = {}
        functions: dict[str, Callable[..., int]] = {
            "cuMemGetAllocationGranularity": self._granularity,
            "cuMemCreate": self._create,
            "cuMemRelease": self._release,
            "cuMemAddressReserve": self._reserve,
            "cuMemAddressFree": self._free,
            "cuMemMap": self._map,
            "cuMemUnmap": self._unmap,
            "cuMemSetAccess": self._allow,
            "cuGetErrorName": self._name,
        }
        for name, arguments in PROTOTYPES.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(functions[name]))

    def _granularity(self, found: Any, properties: Any, option: int) -> int:
        if not _is_on_card(properties) or option != RECOMMENDED:
            return INVALID_VALUE
        found[0] = GRANULARITY
        return 0

    def _create(self, handle: Any, size: int, properties: Any, flags: int) -> int:
        self.calls.append(("Create", size))
        if not size or size % GRANULARITY or flags or not _is_on_card(properties):
            return INVALID_VALUE
        if size > self._left:
            return OUT_OF_MEMORY
        self._left -= size
        file = os.memfd_create("pages")
        os.ftruncate(file, size)
        self.handles[file] = size
        handle[0] = file
        return 0

    def _release(self, handle: int) -> int:
        self.calls.append(("Release",))
        if handle not in self.handles:
            return INVALID_VALUE
        self._left += self.handles.pop(handle)
        os.close(handle)
        return 0

    def _reserve(self, address: Any, size: int, alignment: int, wanted: int, flags: int) -> int:
        self.calls.append(("AddressReserve", size))
        if not size or size % GRANULARITY or alignment % GRANULARITY or wanted or flags:
            return INVALID_VALUE
        whole = size + alignment
        begin = _map_nothing(None, whole)
        aligned = -(-begin // alignment) * alignment
        self.ranges[aligned] = size
        self._wider[aligned] = begin, whole
        address[0] = aligned
        return 0

    def _free(self, address: int, size: int) -> int:
        self.calls.append(("AddressFree", size))
        if self.ranges.get(address) != size or any(
            address <= mapped < address + size for mapped in self.mapped
        ):
            return INVALID_VALUE
        del self.ranges[address]
        return int(_libc.munmap(*self._wider.pop(address)))

    def _map(self, address: int, size: int, offset: int, handle: int, flags: int) -> int:
        self.calls.append(("Map", self._place(address), size))
        is_free = not any(
            at < address + size and address < at + length for at, length in self.mapped.items()
        )
        is_inside = any(
            at <= address and address + size <= at + length for at, length in self.ranges.items()
        )
        if self.handles.get(handle) != size or offset or flags or not is_free or not is_inside:
            return INVALID_VALUE
        _libc.mmap(address, size, _NO_ACCESS, mmap.MAP_SHARED | _FIXED, handle, 0)
        self.mapped[address] = size
        return 0

    def _unmap(self, address: int, size: int) -> int:
        self.calls.append(("Unmap", self._place(address), size))
        if self.mapped.get(address) != size:
            return INVALID_VALUE
        del self.mapped[address]
        _map_nothing(address, size)
        return 0

    def _allow(self, address: int, size: int, access: Any, count: int) -> int:
        self.calls.append(("SetAccess", self._place(address), size))
        inside = [n for at, n in self.mapped.items() if address <= at < address + size]
        wanted = access[0]
        if sum(inside) != size or count != 1 or wanted.location.type != ON_DEVICE:
            return INVALID_VALUE
        if wanted.flags != READ_AND_WRITE:
            return INVALID_VALUE
        return int(_libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE))

    def _name(self, code: int, name: Any) -> int:
        name[0] = _NAMES[code]
        return 0

    def _place(self, address: int) -> int:
        """Return ``address`` counted from the begin of its range."""
        return min(address - at for at in self.ranges if at <= address)


def _is_on_card(properties: Any) -> bool:
    asked = properties[0]
    return bool(
        asked.type == PINNED and asked.location.type == ON_DEVICE and not asked.requested_handles
    )


def _map_nothing(address: int | None, size: int) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if address is None else _FIXED)
    return int(_libc.mmap(address, size, _NO_ACCESS, flags, -1, 0))
