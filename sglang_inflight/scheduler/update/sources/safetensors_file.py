"""A file of the safetensors format, read tensor by tensor.

The format's library maps the file, and holds the interpreter while it opens the file. The format
is small: the header's length in eight bytes, the header in JSON, and the tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch

from sglang_inflight.scheduler.update.rate import paced
from sglang_inflight.scheduler.update.sources.batches import Packed
from sglang_inflight.scheduler.update.sources.regular_file import RegularFile
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


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place in its file, with its dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    def of(self, content: Packed, start: int) -> torch.Tensor:
        """Return the tensor out of ``content``, the file's bytes from ``start`` on.

        The format does not align tensors.
        """
        return content.view_or_copy(self.start - start, self.end - start, self.dtype, self.shape)

    def without_memory(self) -> torch.Tensor:
        """Return a tensor of the meta device in its place."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def _any(place: Place) -> bool:
    return True


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

    def __init__(self, path: str, name: str) -> None:
        super().__init__(path, name)
        try:
            # where the first tensor begins, the hash of the bytes before it, and the tensors in the
            # order of the file
            self.start, self.head_sha256, self.places = self._read_header()
        except BaseException:
            self.close()
            raise

    def batches(self, most: int, wants: Callable[[Place], bool] = _any) -> Iterator[list[Place]]:
        """Yield neighbours with up to ``most`` bytes together, and each larger tensor alone.

        ``wants`` says whether a tensor is read.
        """
        batch: list[Place] = []
        for place in paced(self.places):
            if not wants(place):
                continue
            is_next = bool(batch) and batch[-1].end == place.start
            if batch and (not is_next or place.end - batch[0].start > most):
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch

    def _read_header(self) -> tuple[int, hashlib._Hash, list[Place]]:
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
        start = _LENGTH_BYTES + length
        header = self.read(length, _LENGTH_BYTES)
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
        sha256 = hashlib.sha256(in_front)
        sha256.update(header)
        return start, sha256, places

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
