"""A file of the safetensors format, read tensor by tensor.

The format's library maps the file, and holds the interpreter while it opens the file. The format
is small: the header's length in eight bytes, the header in JSON, and the tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import torch

from sglang_inflight.scheduler.update.rate import paced
from sglang_inflight.scheduler.update.sources.regular_file import RegularFile
from sglang_inflight.scheduler.update.sources.stretch import Stretch
from sglang_inflight.vocabulary.errors import Refused, shorten

# Decoding a header of this size, for over a hundred thousand tensors, holds the interpreter for a
# fiftieth of a second. The library's own limit is 100 MB.
MOST_HEADER_BYTES = 16 << 20
_LENGTH_BYTES = 8
_METADATA = "__metadata__"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8

_Natural = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[_Natural]
    data_offsets: tuple[_Natural, _Natural]


_ENTRY = msgspec.json.Decoder(_Entry)


class Place(msgspec.Struct, frozen=True, gc=False):
    """A tensor's place in its file, with its dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class Wanted(NamedTuple):
    """Which stored tensors are read.

    ``key``: an object that has the same answers as long as it lives, or None.
    """

    says: Callable[[Place], bool]
    key: object | None = None


EVERYTHING = Wanted(lambda place: True)


class Chosen(NamedTuple):
    """The wanted tensors of a file, each stretch with its first byte in the file; and the others.

    Stretches of others have neighbours that are none in the file, and no row.
    """

    wanted: list[tuple[Stretch, int]]
    others: list[Stretch]


class Index:
    """A file's header, parsed. ``start``: where the first tensor begins.

    Checkpoints of one model often have the same headers. A kept index costs no Python for a tensor.
    """

    def __init__(self, start: int, size: int, places: list[Place]) -> None:
        """``size``: the file's. ``places``: in the order of the file."""
        self.start = start
        self.size = size
        self.places = places
        self._chosen: WeakKeyDictionary[object, Chosen] = WeakKeyDictionary()

    def choose(self, wants: Wanted) -> Chosen:
        """Return the tensors to read, in the order of the file."""
        if wants.key is not None and (known := self._chosen.get(wants.key)) is not None:
            return known
        chosen = Chosen([], [])
        end = -1
        for place in paced(self.places):
            size = place.nbytes
            if wants.says(place):
                is_next = place.start == end and chosen.wanted[-1][0].has_room_for(size)
                if not is_next:
                    chosen.wanted.append((Stretch.begin(), place.start))
                to, end = chosen.wanted[-1][0], place.end
            else:
                if not chosen.others or not chosen.others[-1].has_room_for(0):
                    chosen.others.append(Stretch.begin())
                to, size = chosen.others[-1], 0
            to.add(place.name, place.dtype, place.shape, size)
        if wants.key is not None:
            self._chosen[wants.key] = chosen
        return chosen


class Indexes:
    """The indexes of the files that were read last, by the SHA-256 of their headers.

    One reading at a time uses them. A thread that was abandoned may add one, which is right, too.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, Index] = {}

    def find(self, digest: bytes, size: int) -> Index | None:
        found = self._kept.get(digest)
        return found if found is not None and found.size == size else None

    def keep(self, files: Iterable[SafetensorsFile]) -> None:
        """Keep the indexes of ``files``, and no others."""
        self._kept = {file.head_sha256.digest(): file.index for file in files}


def write_head(tensors: Iterable[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the first tensor, for a file of ``tensors`` in this order.

    ``metadata`` comes first. Raises ``Refused`` if the format has no name for a dtype.
    """
    entries: dict[str, object] = {_METADATA: metadata}
    at = 0
    for name, tensor in tensors:
        if (dtype := _NAMES.get(tensor.dtype)) is None:
            raise Refused(f"{name!r} is of {tensor.dtype}, for which safetensors has no name")
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % _ALIGNMENT)
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header


class SafetensorsFile(RegularFile):
    """An open file with a read and consistent header."""

    def __init__(self, path: str, name: str, indexes: Indexes | None = None) -> None:
        """``indexes``: those known already."""
        super().__init__(path, name)
        try:
            # the hash of the bytes before the first tensor
            self.head_sha256, header = self._read_header()
            start = _LENGTH_BYTES + len(header)
            known = indexes.find(self.head_sha256.digest(), self.size) if indexes else None
            # whether a file of the last reading has the same header
            self.is_known = known is not None
            self.index = known or Index(start, self.size, self._parse(header, start))
        except BaseException:
            self.close()
            raise

    @property
    def start(self) -> int:
        """Where the first tensor begins."""
        return self.index.start

    @property
    def places(self) -> list[Place]:
        """The tensors, in the order of the file."""
        return self.index.places

    def _read_header(self) -> tuple[hashlib._Hash, bytes]:
        if self.size < _LENGTH_BYTES:
            raise self._malformed("it is too short")
        in_front = self.read(_LENGTH_BYTES, 0)
        length = int.from_bytes(in_front, "little")
        if length > self.size - _LENGTH_BYTES:
            raise self._malformed(
                f"its header should have {length} bytes, and the file has {self.size}"
            )
        if length > MOST_HEADER_BYTES:
            raise self._malformed(f"its header has {length} bytes, {MOST_HEADER_BYTES} at most")
        header = self.read(length, _LENGTH_BYTES)
        sha256 = hashlib.sha256(in_front)
        sha256.update(header)
        return sha256, header

    def _parse(self, header: bytes, start: int) -> list[Place]:
        try:
            # first the whole and then each entry, so that other threads get the interpreter
            entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            entries.pop(_METADATA, None)
            places = [
                self._place(name, _ENTRY.decode(entry), start) for name, entry in entries.items()
            ]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._malformed(f"its header: {shorten(str(error))}") from error
        places.sort(key=lambda place: (place.start, place.end))
        self._check_tiles(places, start)
        return places

    def _place(self, name: str, entry: _Entry, base: int) -> Place:
        if (dtype := _DTYPES.get(entry.dtype)) is None:
            raise self._malformed(
                f"tensor {shorten(name)!r} is of dtype {shorten(entry.dtype)!r}, which is not known"
            )
        start, end = entry.data_offsets
        if math.prod(entry.shape) * dtype.itemsize != end - start:
            raise self._malformed(
                f"tensor {shorten(name)!r} should have shape {entry.shape[:8]} and dtype "
                f"{entry.dtype}, but has {end - start} bytes"
            )
        return Place(name, dtype, tuple(entry.shape), base + start, base + end)

    def _check_tiles(self, places: list[Place], base: int) -> None:
        """Raise ``Refused`` for gaps or overlaps between tensors, and for a file cut short."""
        at = base
        for place in places:
            if place.start != at:
                raise self._malformed(
                    f"tensor {shorten(place.name)!r} does not begin at the end of the one before"
                )
            at = place.end
        if at != self.size:
            raise self._malformed(f"it should have {at} bytes, and has {self.size}")

    def _malformed(self, why: str) -> Refused:
        return Refused(f"{self.name} is not a valid safetensors file: {why}")
