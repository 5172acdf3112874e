"""Decode bodies with whole tensors while they arrive.

Decoding 500 MB of base64 at once would block the event loop, and every stream, for seconds. The
scheduler's loop would block again when reading the message from its socket. So each large string
is decoded chunk by chunk, on arrival, into an anonymous file, and ranks read the file. The small
rest is decoded like every body.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import msgspec
import pybase64
from fastapi import Request

from sglang_inflight.messages import Payload, PayloadFile
from sglang_inflight.vocabulary.errors import Exhausted, Refused, TooLarge

# Decoding this much JSON holds the interpreter for some milliseconds.
LARGE_STRING_BYTES = 64 << 10
# the body without its large strings; decoding so much takes a tenth of a second
MOST_REST_BYTES = 16 << 20
# each takes a file
MOST_LARGE_STRINGS = 1024

_LONGEST_ESCAPE = len(rb"\u0000")


@contextmanager
def large_body() -> Iterator[LargeBody]:
    """Keep a body's files open until its call is answered."""
    body = LargeBody()
    try:
        yield body
    finally:
        body.close()


class LargeBody:
    """A JSON body with its large base64 strings moved to files.

    A short random base64 string replaces each large string. So the rest decodes without special
    cases, and a caller cannot guess a replacement to name a file.

    Belongs to one call, on the event loop. The files end with this process.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        # where the current string begins in ``_rest``
        self._string: int | None = None
        self._escapes = False
        self._large: _LargeString | None = None
        self._files: dict[bytes, _LargeString] = {}

    async def read(self, request: Request) -> bytes:
        """Return the body without its large strings. ``Refused`` is raised after the last chunk."""
        chunks = request.stream()
        try:
            async for chunk in chunks:
                self.feed(chunk)
        except Refused:
            # a caller would not read the answer before it has sent the whole body
            await _discard(chunks)
            raise
        return bytes(self._rest)

    def feed(self, chunk: bytes) -> None:
        at = 0
        while at < len(chunk):
            if self._large is not None:
                at = self._feed_large(self._large, chunk, at)
            elif self._string is not None:
                at = self._feed_string(self._string, chunk, at)
            else:
                end = chunk.find(b'"', at) + 1
                self._keep(chunk[at : end or len(chunk)])
                at = end or len(chunk)
                if end:
                    self._string = len(self._rest)

    def put_back(self, payloads: list[bytes], *, as_files: bool = True) -> list[Payload]:
        """Return the decoded ``payloads``, each large one as a file.

        With ``as_files`` false, return contents, for ranks on other machines. Raises ``Refused``
        if another field held a large string.
        """
        if len(self._files.keys() & set(payloads)) != len(self._files):
            raise Refused(
                "bad request body: only serialized_named_tensors may hold strings of more than "
                f"{LARGE_STRING_BYTES} bytes"
            )
        return [
            payload
            if (large := self._files.get(payload)) is None
            else (large.as_payload() if as_files else large.read())
            for payload in payloads
        ]

    def close(self) -> None:
        for file in (*self._files.values(), *filter(None, [self._large])):
            file.close()

    def _keep(self, part: bytes) -> None:
        self._rest += part
        if len(self._rest) > MOST_REST_BYTES:
            raise TooLarge(
                f"the body has more than {MOST_REST_BYTES} bytes, not counting tensors in base64"
            )

    def _feed_string(self, begin: int, chunk: bytes, at: int) -> int:
        """Keep a string up to its end, or until it exceeds ``LARGE_STRING_BYTES``."""
        end = at
        if self._escapes:
            end, self._escapes = end + 1, False
        while True:
            quote = chunk.find(b'"', end)
            escape = chunk.find(b"\\", end, quote if quote >= 0 else len(chunk))
            if escape < 0:
                break
            end = escape + 2
            if end > len(chunk):
                self._escapes = True
                break
        ends = quote >= 0 and not self._escapes
        end = quote if ends else len(chunk)
        if len(self._rest) - begin + end - at > LARGE_STRING_BYTES:
            if len(self._files) == MOST_LARGE_STRINGS:
                raise TooLarge(f"the body holds more than {MOST_LARGE_STRINGS} tensors in base64")
            start = bytes(self._rest[begin:])
            del self._rest[begin:]
            self._string, self._escapes = None, False
            self._large = _LargeString()
            self._large.feed(start)
            return at
        self._keep(chunk[at:end])
        if ends:
            self._keep(b'"')
            self._string = None
            return end + 1
        return end

    def _feed_large(self, large: _LargeString, chunk: bytes, at: int) -> int:
        quote = chunk.find(b'"', at)
        end = quote if quote >= 0 else len(chunk)
        large.feed(chunk[at:end], is_last=quote >= 0)
        if quote < 0:
            return end
        token = secrets.token_bytes(24)
        self._files[token] = large
        self._large = None
        self._keep(base64.b64encode(token) + b'"')
        return end + 1


class _LargeString:
    """A file with one base64 string's decoded content."""

    def __init__(self) -> None:
        try:
            self._fd = os.memfd_create("inflight-payload", os.MFD_CLOEXEC)
        except OSError as error:
            if not Exhausted.is_cause_of(error):
                raise
            raise Exhausted(
                f"no file for a tensor of the body: {error.strerror} in the server's HTTP process"
            ) from error
        # text too short to be decoded yet
        self._text = b""

    def feed(self, text: bytes, *, is_last: bool = False) -> None:
        text = self._text + text
        text, self._text = _unescape(text, is_last) if b"\\" in text else (text, b"")
        if not is_last:
            # the last four characters may be padding: decode them at the end only
            whole = max(0, len(text) - 1) // 4 * 4
            text, self._text = text[:whole], text[whole:] + self._text
        try:
            content = pybase64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise _no_base64(str(error)) from error
        if not is_last and len(content) * 4 != len(text) * 3:
            raise _no_base64("text follows its padding")
        left = memoryview(content)
        while left:
            left = left[os.write(self._fd, left) :]

    def read(self) -> bytes:
        parts: list[bytes] = []
        at, size = 0, os.fstat(self._fd).st_size
        # Linux reads at most 2 GiB at a time
        while at < size:
            parts.append(os.pread(self._fd, size - at, at))
            at += len(parts[-1])
        return b"".join(parts)

    def as_payload(self) -> PayloadFile:
        return PayloadFile(path=f"/proc/{os.getpid()}/fd/{self._fd}")

    def close(self) -> None:
        os.close(self._fd)


def _unescape(text: bytes, is_last: bool) -> tuple[bytes, bytes]:
    """Resolve JSON escapes; also return a rest that may be the beginning of an escape."""
    last = text.rfind(b"\\")
    cut = last if not is_last and len(text) - last < _LONGEST_ESCAPE else len(text)
    try:
        return msgspec.json.decode(b'"%b"' % text[:cut], type=str).encode(), text[cut:]
    except msgspec.DecodeError as error:
        raise _no_base64(str(error)) from error


def _no_base64(why: str) -> Refused:
    return Refused(
        f"bad request body: a string of more than {LARGE_STRING_BYTES} bytes must be base64, as in "
        f"serialized_named_tensors: {why}"
    )


async def _discard(chunks: AsyncIterator[bytes]) -> None:
    async for _ in chunks:
        pass
