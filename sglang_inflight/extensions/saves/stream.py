"""One rank's served weights on a connection, in frames. Imports no SGLang.

The receiver sends the offer's token. Then the offering rank alone sends:

    HEAD     ``Head``: the layout, the tensors' names, shapes and dtypes, and the numbers
    PIECE    bytes of the first tensor, until all have come; then
    DIGEST   the tensor's digest; and so on, in the order of the head
    END      the digest of the rank
    WAIT     before any other frame: it goes on, after another receiver
    WHY      in place of any other frame: why no more comes

A frame is its kind in one byte, its length in eight, and its content. The receiver knows each
length before it takes memory for it. A call on a connection ends within ``SILENCE_S`` if the other
side is silent: a machine may be gone without a word.
"""

from __future__ import annotations

import enum
import hmac
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import msgspec

from sglang_inflight.vocabulary.bodies import DigestText, Name, Version, check_version
from sglang_inflight.vocabulary.errors import Conflict, Refused, describe, shorten

logger = logging.getLogger(__name__)

# the offering rank may be reading for a slow pace, and its network may be busy
SILENCE_S = 30.0
# a receiver sends its token at once
_TOKEN_S = 10.0
# the last frame ends before, unless nobody receives it
_TELL_S = 5.0
# pause between two frames that tell a receiver to wait
_TEND_S = 1.0
# connections whose token has not come
_MOST_STRANGERS = 32
TOKEN_BYTES = 64
# decoding holds the interpreter; a tensor takes some 100 bytes
_MOST_HEAD_BYTES = 16 << 20
_MOST_TEXT_BYTES = 4096
_LENGTH_BYTES = 8

Format = Literal["sglang-inflight-offered"]
FORMAT: Format = "sglang-inflight-offered"


class Kind(enum.IntEnum):
    HEAD = 1
    PIECE = 2
    DIGEST = 3
    END = 4
    WHY = 5
    WAIT = 6


def _front(kind: Kind, length: int) -> bytes:
    return bytes([kind]) + length.to_bytes(_LENGTH_BYTES, "little")


_WAIT = _front(Kind.WAIT, 0)


class Described(msgspec.Struct, frozen=True, gc=False):
    """A tensor that comes. ``dtype`` is as torch writes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Head(msgspec.Struct, frozen=True):
    """``layout`` and ``numbers`` are as in ``manifest.RankPart``."""

    format: Format
    offer_id: Name
    weight_version: Version
    layout: dict[str, str]
    tensors: list[Described]
    numbers: dict[str, str]

    def __post_init__(self) -> None:
        check_version(self.weight_version)


class Connection:
    """A connection to the other side. Each side sends, or receives, from one thread at a time.

    Raises ``OSError`` if the other side is gone or silent, and ``Conflict`` for its ``WHY``.
    """

    def __init__(self, raw: socket.socket) -> None:
        raw.settimeout(SILENCE_S)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = raw
        # a frame is never sent within another one
        self._sending = threading.Lock()

    @classmethod
    def to(cls, host: str, port: int, token: str) -> Connection:
        """Connect, and send the token."""
        connection = cls(socket.create_connection((host, port), timeout=SILENCE_S))
        try:
            connection._socket.sendall(token.encode())
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close. A call that waits on another thread ends."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # ---- the offering side ---------------------------------------------------------

    def send(self, kind: Kind, content: memoryview | bytes) -> None:
        with self._sending:
            self._send(kind, content)

    def tell(self, why: str) -> None:
        """Send why no more comes, unless nobody receives."""
        if not self._sending.acquire(timeout=_TELL_S):
            return
        try:
            with suppress(OSError):
                self._send(Kind.WHY, why.encode()[:_MOST_TEXT_BYTES])
        finally:
            self._sending.release()

    def _send(self, kind: Kind, content: memoryview | bytes) -> None:
        front = _front(kind, len(content))
        if len(content) <= _MOST_TEXT_BYTES:
            self._socket.sendall(front + content)
        else:
            self._socket.sendall(front)
            self._socket.sendall(content)

    # ---- the receiving side --------------------------------------------------------

    def receive_head(self) -> Head:
        content = self._receive(Kind.HEAD, _MOST_HEAD_BYTES)
        try:
            return msgspec.json.decode(content, type=Head)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Refused(f"its head cannot be read: {shorten(str(error))}") from error

    def receive_digest(self, kind: Kind) -> str:
        """Return the digest in a frame ``DIGEST`` or ``END``."""
        content = self._receive(kind, _MOST_TEXT_BYTES)
        try:
            return msgspec.convert(content.decode(errors="replace"), type=DigestText)
        except msgspec.ValidationError as error:
            raise Refused(f"a digest is malformed: {error}") from error

    def receive_into(self, whole: memoryview, spend: Callable[[int], None]) -> None:
        """Fill ``whole`` from the pieces of one tensor. ``spend`` gets each piece's bytes."""
        done = 0
        while done < len(whole):
            length = self._receive_front(Kind.PIECE, len(whole) - done)
            self._fill(whole[done : done + length])
            done += length
            spend(length)

    def _receive(self, kind: Kind, most: int) -> bytes:
        content = bytearray(self._receive_front(kind, most))
        self._fill(memoryview(content))
        return bytes(content)

    def _receive_front(self, kind: Kind, most: int) -> int:
        """Return the length of a frame of ``kind``. Raises ``Refused`` if it is not due."""
        front = bytearray(1 + _LENGTH_BYTES)
        self._fill(memoryview(front))
        while front == _WAIT:
            self._fill(memoryview(front))
        found, length = front[0], int.from_bytes(front[1:], "little")
        if found == Kind.WHY and length <= _MOST_TEXT_BYTES:
            why = bytearray(length)
            self._fill(memoryview(why))
            raise Conflict(shorten(why.decode(errors="replace")))
        if found != kind:
            raise Refused(f"a frame of kind {found} came, and {kind.name} was due")
        if length > most or (kind is Kind.PIECE and not length):
            raise Refused(f"a frame {kind.name} has {length} bytes, {most} at most")
        return length

    def _fill(self, whole: memoryview) -> None:
        done = 0
        while done < len(whole):
            received = self._socket.recv_into(whole[done:])
            if not received:
                raise ConnectionError("the connection was closed")
            done += received


@contextmanager
def naming(rank: str, host: str, port: int) -> Iterator[None]:
    """Name the offering rank in errors. Raise ``Conflict`` for those of the network."""
    name = f"the peer's rank {rank} ({shorten(host)}:{port})"
    try:
        yield
    except TimeoutError as error:
        raise Conflict(f"{name} has been silent for {SILENCE_S:g} s") from error
    except OSError as error:
        raise Conflict(f"{name}: {describe(error)}") from error
    except Refused as error:
        raise type(error)(f"{name}: {error}") from error


class Listener:
    """Listens for receivers that know the token. Belongs to one thread.

    A connection that does not begin with the token is closed. It delays no other one. Connections
    with the token wait for ``poll``. ``tend`` tells them that it goes on.
    """

    def __init__(self, host: str, token: str) -> None:
        """Raises ``Refused`` if ``host`` is no address of this machine."""
        self._token = token.encode()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._selector = selectors.DefaultSelector()
        # a stranger's first bytes, and when its time is over
        self._strangers: dict[socket.socket, tuple[bytearray, float]] = {}
        self._waiting: deque[Connection] = deque()
        self._tended_at = 0.0
        self._listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listening.bind((host, 0))
            self._listening.listen()
            self._listening.setblocking(False)
            self._selector.register(self._listening, selectors.EVENT_READ)
        except OSError as error:
            self.close()
            raise Refused(f"no rank can listen at {host}: {describe(error)}") from error
        self.host: str = host
        self.port: int = self._listening.getsockname()[1]

    def poll(self, timeout_s: float) -> Connection | None:
        """Return the next connection with the token, or None if none comes in time."""
        self._look(0.0 if self._waiting else timeout_s)
        return self._waiting.popleft() if self._waiting else None

    def tend(self) -> None:
        """Accept connections, and tell those that wait that it goes on. Cheap if just done."""
        if time.monotonic() < self._tended_at + _TEND_S:
            return
        self._look(0.0)
        for connection in tuple(self._waiting):
            try:
                connection.send(Kind.WAIT, b"")
            except OSError:
                # the receiver has left
                self._waiting.remove(connection)
                connection.close()
        self._tended_at = time.monotonic()

    def _look(self, timeout_s: float) -> None:
        ready = [key.fileobj for key, _ in self._selector.select(timeout_s)]
        if self._listening in ready:
            self._accept()
        for stranger in [each for each in self._strangers if each in ready]:
            if (connection := self._read_token(stranger)) is not None:
                self._waiting.append(connection)
        for stranger, (_, ends_at) in tuple(self._strangers.items()):
            if time.monotonic() > ends_at:
                self._refuse(stranger)

    def close(self) -> None:
        for connection in self._waiting:
            connection.close()
        for stranger in tuple(self._strangers):
            self._refuse(stranger)
        self._selector.close()
        self._listening.close()

    def _accept(self) -> None:
        try:
            stranger, _ = self._listening.accept()
        except OSError as error:
            # it has left already, or this process has no descriptor for it
            logger.warning("A connection to an offer of weights failed: %s", describe(error))
            return
        if len(self._strangers) == _MOST_STRANGERS:
            self._refuse(next(iter(self._strangers)))
        stranger.setblocking(False)
        self._strangers[stranger] = bytearray(), time.monotonic() + _TOKEN_S
        self._selector.register(stranger, selectors.EVENT_READ)

    def _read_token(self, stranger: socket.socket) -> Connection | None:
        came, _ = self._strangers[stranger]
        try:
            more = stranger.recv(TOKEN_BYTES - len(came))
        except BlockingIOError:
            return None
        except OSError:
            more = b""
        came += more
        if more and len(came) < TOKEN_BYTES:
            return None
        if not hmac.compare_digest(bytes(came), self._token):
            logger.warning("A connection without the token of an offer of weights was closed.")
            self._refuse(stranger)
            return None
        self._forget(stranger)
        return Connection(stranger)

    def _refuse(self, stranger: socket.socket) -> None:
        self._forget(stranger)
        stranger.close()

    def _forget(self, stranger: socket.socket) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger)
