"""The note from a prefill server to a decode server: the versions that made the KV.

The note has few bytes, to fit into SGLang's own protocol. There each request has a row of numbers,
sent with its KV in lines of at least 64 bytes, and SGLang uses the first few. So no extra message
is sent, and a server without this package ignores the note.

The note lists the KV's positions, those of the prompt, and one more for the first token. A name too
long for the note is replaced by its hash: a server that knows the name can recognise it. If there
is still no room, the first parts are merged, without a name.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

_CHECKSUM = 4  # bytes; one byte with the text's length follows
_HASH = 8  # bytes


class Part(NamedTuple):
    """``length`` positions, made by one version and epoch of the prefill server."""

    epoch: int
    # the name, its hash, or None if the note omits it
    version: str | bytes | None
    length: int


# ``Any``: with another type msgspec would not distinguish text from bytes
_decoder = msgspec.msgpack.Decoder(list[tuple[int, Any, int]])


def hash_name(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()[:_HASH]


def write_note(parts: Sequence[Part], *, room: int, size: int) -> bytes:
    """Return a note of ``size`` bytes, at least 32, valid only for the transfer in ``room``."""
    for shorter in _shorter_and_shorter(list(parts)):
        text = msgspec.msgpack.encode(shorter)
        if len(text) <= size - _CHECKSUM - 1:
            break
    body = (bytes([len(text)]) + text).ljust(size - _CHECKSUM, b"\0")
    return _checksum(body, room) + body


def read_note(note: bytes, *, room: int) -> list[Part] | None:
    """Return the note's parts; None if it is of another transfer or in an unknown format."""
    checksum, body = note[:_CHECKSUM], note[_CHECKSUM:]
    if checksum != _checksum(body, room):
        return None
    try:
        parts = [Part(*part) for part in _decoder.decode(body[1 : 1 + body[0]])]
    except msgspec.DecodeError:
        return None
    names = [part.version for part in parts]
    return parts if all(isinstance(name, str | bytes | None) for name in names) else None


def _checksum(body: bytes, room: int) -> bytes:
    return zlib.crc32(body, room & 0xFFFFFFFF).to_bytes(_CHECKSUM, "little")


def _shorter_and_shorter(parts: list[Part]) -> list[list[Part]]:
    hashed = [
        part._replace(version=hash_name(part.version))
        if isinstance(part.version, str) and len(part.version.encode()) > _HASH
        else part
        for part in parts
    ]
    return [
        parts,
        *(
            [*_as_one(hashed[:together]), *hashed[together:]]
            for together in (0, *range(2, len(hashed) + 1))
        ),
    ]


def _as_one(parts: list[Part]) -> list[Part]:
    if not parts:
        return []
    return [Part(parts[-1].epoch, None, sum(part.length for part in parts))]
