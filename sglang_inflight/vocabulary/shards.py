"""Regions of many tensors as text: what each rank of a server uses, or each rank of a trainer has.

A line of JSON describes one tensor:

    ["NAME","DTYPE",[SIZE,SIZE],[[START,START],[SIZE,SIZE]], ...]

with the shape of the whole tensor, and the starts and sizes of each region. The lines are UTF-8
without spaces, in the order of the checkpoint or of the trainer, and each ends with a newline. They
travel compressed by zlib, and their digest is that of the lines: SHA-256 in hexadecimal.

Imports no SGLang.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from sglang_inflight.vocabulary.regions import Region

# level 1 is as small as 9 within a tenth: names differ in their numbers alone
_LEVEL = 1
# lines of a hundred thousand tensors have some 10 MB
_MOST_BYTES = 256 << 20
_Line = tuple[str, str, tuple[int, ...]]

_encoder = msgspec.json.Encoder()


class Held(NamedTuple):
    """Regions of one tensor. ``dtype`` is torch's name, such as ``bfloat16``."""

    dtype: str
    shape: tuple[int, ...]
    regions: tuple[Region, ...]


class Shards(NamedTuple):
    """Compressed lines, and their digest."""

    digest: str
    lines: bytes


def write_shards(held: Iterable[tuple[str, Held]]) -> Shards:
    """Return the lines of ``held``: names of tensors, and their regions."""
    digest, press = hashlib.sha256(), zlib.compressobj(_LEVEL)
    lines: list[bytes] = []
    for name, (dtype, shape, regions) in held:
        line = _encoder.encode([name, dtype, shape, *regions]) + b"\n"
        digest.update(line)
        lines.append(press.compress(line))
    lines.append(press.flush())
    return Shards(digest.hexdigest(), b"".join(lines))


def read_shards(shards: Shards) -> dict[str, Held]:
    """Return what ``write_shards`` was given.

    Raises ``ValueError`` for other lines than the digest's, and for a line that is wrong.
    """
    try:
        press = zlib.decompressobj()
        text = press.decompress(shards.lines, _MOST_BYTES)
        is_whole = press.eof and not press.unconsumed_tail
    except zlib.error as error:
        raise ValueError(f"the regions of tensors are not compressed by zlib: {error}") from error
    if not is_whole:
        raise ValueError(f"the regions of tensors are cut short, or over {_MOST_BYTES} bytes")
    if (found := hashlib.sha256(text).hexdigest()) != shards.digest:
        raise ValueError(f"the regions of tensors have the digest {found}, not {shards.digest}")
    return dict(map(_read, text.splitlines()))


def _read(line: bytes) -> tuple[str, Held]:
    try:
        name, dtype, shape, *regions = msgspec.json.decode(line)
        name, dtype = msgspec.convert((name, dtype), tuple[str, str])
        shape = msgspec.convert(shape, tuple[int, ...])
        found = tuple(_region(each) for each in regions)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise ValueError(f"no regions of a tensor: {line[:200]!r}: {error}") from error
    for region in found:
        if not region.is_within(shape):
            raise ValueError(f"the tensor {name!r} of shape {list(shape)} has no {region}")
    return name, Held(dtype, shape, found)


def _region(found: object) -> Region:
    starts, sizes = msgspec.convert(found, tuple[tuple[int, ...], tuple[int, ...]])
    if len(starts) != len(sizes):
        raise ValueError(f"{starts} and {sizes} differ in length")
    return Region(starts, sizes)


def digests_of(of_ranks: Iterable[Shards]) -> str:
    """Return one digest of several ranks' lines, in their order."""
    return hashlib.sha256("\n".join(each.digest for each in of_ranks).encode()).hexdigest()
