"""Physical pages of a card that change places under addresses that stay, by calls to its driver.

Weights at such addresses could be exchanged without a copy: captured graphs hold addresses alone.
The driver's calls are not ordered by a stream, so nothing may be using the range meanwhile.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import ExitStack
from ctypes import POINTER, Structure, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_ushort
from typing import Any, NamedTuple

import torch

# values of the driver's header, cuda.h
PINNED = 1
ON_DEVICE = 1
READ_AND_WRITE = 3
RECOMMENDED = 1


class Location(Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", c_int), ("id", c_int))


class Flags(Structure):
    """``CUmemAllocationProp.allocFlags``."""

    _fields_ = (
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class Properties(Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", c_int),
        ("requested_handles", c_int),
        ("location", Location),
        ("win32_metadata", c_size_t),
        ("flags", Flags),
    )


class Access(Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", Location), ("flags", c_int))


# addresses, handles and sizes have 64 bits
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(Properties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(Properties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(Access), c_size_t),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}


class DriverError(Exception):
    """A call of the driver failed; the message names the call and its error."""


class Driver:
    """The driver's calls for one card. The card's context is current in the calling thread."""

    def __init__(self, library: Any, card: int = 0) -> None:
        """``library`` has the functions of ``PROTOTYPES``: ``ctypes.CDLL("libcuda.so.1")``."""
        self._calls = {}
        for name, arguments in PROTOTYPES.items():
            call = getattr(library, name)
            call.argtypes, call.restype = arguments, c_int
            self._calls[name] = call
        location = Location(ON_DEVICE, card)
        self._properties = Properties(type=PINNED, location=location)
        self._access = Access(location, READ_AND_WRITE)

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._calls[name](*arguments)
        if code:
            said = c_char_p()
            self._calls["cuGetErrorName"](code, ctypes.byref(said))
            raise DriverError(f"{name} failed: {(said.value or b'unknown').decode()} ({code})")

    def granularity(self) -> int:
        """Return the bytes of which sizes and addresses are multiples."""
        found = c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(found),
            ctypes.byref(self._properties),
            RECOMMENDED,
        )
        return found.value

    def create(self, size: int) -> int:
        """Return the handle of ``size`` bytes of the card's memory, without an address."""
        handle = c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), 0)
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def reserve(self, size: int, alignment: int) -> int:
        """Return the begin of ``size`` bytes of addresses, without memory."""
        address = c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), size, alignment, 0, 0)
        return address.value

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int, handle: int) -> None:
        """Put the memory of ``handle`` at ``address``. No kernel may touch it before ``allow``."""
        self._call("cuMemMap", address, size, 0, handle, 0)

    def unmap(self, address: int, size: int) -> None:
        """Undo one ``map``. Nothing may be using the memory."""
        self._call("cuMemUnmap", address, size)

    def allow(self, address: int, size: int) -> None:
        """Let the card read and write the range, all of which is mapped."""
        self._call("cuMemSetAccess", address, size, ctypes.byref(self._access), 1)


class Took(NamedTuple):
    """The microseconds of an exchange of pages."""

    unmap: float
    map: float
    allow: float

    @property
    def whole(self) -> float:
        return sum(self)


class Arena:
    """A range of addresses, and twice as much memory: one half is mapped there."""

    def __init__(self, driver: Driver, size: int, handles: int) -> None:
        """Make two sets of ``handles`` handles, of at least ``size`` bytes each, and map one."""
        self._driver = driver
        granularity = driver.granularity()
        self._piece = -(-size // (handles * granularity)) * granularity
        self.size = handles * self._piece
        with ExitStack() as made:
            self.address = driver.reserve(self.size, granularity)
            made.callback(driver.free, self.address, self.size)
            self._sets: list[list[int]] = [[], []]
            for one in self._sets:
                for _ in range(handles):
                    one.append(driver.create(self._piece))
                    made.callback(driver.release, one[-1])
            for address, handle in zip(self._addresses, self._sets[0], strict=True):
                driver.map(address, self._piece, handle)
                made.callback(driver.unmap, address, self._piece)
            driver.allow(self.address, self.size)
            self._made = made.pop_all()

    @property
    def _addresses(self) -> range:
        return range(self.address, self.address + self.size, self._piece)

    def exchange(self) -> Took:
        """Map the other half. Nothing may be using the range."""
        self._sets.reverse()
        begin = time.perf_counter()
        for address in self._addresses:
            # one call undoes one mapping
            self._driver.unmap(address, self._piece)
        unmapped = time.perf_counter()
        for address, handle in zip(self._addresses, self._sets[0], strict=True):
            self._driver.map(address, self._piece, handle)
        mapped = time.perf_counter()
        self._driver.allow(self.address, self.size)
        end = time.perf_counter()
        return Took((unmapped - begin) * 1e6, (mapped - unmapped) * 1e6, (end - mapped) * 1e6)

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Return the range as a row of int64, which must not outlive the arena.

        ``device`` names the card by its index.
        """
        storage = torch._C._construct_storage_from_data_pointer(self.address, device, self.size)
        row = torch.empty(0, dtype=torch.int64, device=device)
        return row.set_(storage, 0, (self.size // 8,))  # type: ignore[call-overload]

    def close(self) -> None:
        """Give everything back. Nothing is using the range."""
        self._made.close()
