"""What a prefill server says of the KV that it sends to a decode server: who made which part.

It is a note of few bytes, because it goes where SGLang's own protocol has room: each request
has a row of numbers that crosses with its KV, in lines of at least 64 bytes, of which SGLang
uses the first few. So nothing is sent that was not sent before, and a server without us passes
over it.

The KV's positions are those of the prompt; one more stands for the first token. Names that are
too long for the note are told by their hash, which whoever has heard the name can tell it by.
If even so there is no room, the first parts are put together and named by nobody.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

_CHECKSUM = 4  # bytes; then one that counts those of the text
_HASH = 8  # bytes


class Part(NamedTuple):
    """``length`` positions, made by a version in an epoch of the prefill server."""

    epoch: int
    # its name, or the hash of it, or None where the note does not tell
    version: str | bytes | None
    length: int


# of one part, `msgspec` tells text from bytes only where anything may be
_decoder = msgspec.msgpack.Decoder(list[tuple[int, Any, int]])


def hash_name(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()[:_HASH]


def write_note(parts: Sequence[Part], *, room: int, size: int) -> bytes:
    """``size`` bytes, at least 32. Only of the transfer in ``room`` they are a note."""
    for shorter in _shorter_and_shorter(list(parts)):
        text = msgspec.msgpack.encode(shorter)
        if len(text) <= size - _CHECKSUM - 1:
            break
    body = (bytes([len(text)]) + text).ljust(size - _CHECKSUM, b"\0")
    return _checksum(body, room) + body


def read_note(note: bytes, *, room: int) -> list[Part] | None:
    """None where these bytes are no note of that transfer, or one that only others can read."""
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
