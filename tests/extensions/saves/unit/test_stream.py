"""A connection takes what the other side may send, and refuses all else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from sglang_inflight.extensions.saves import stream
from sglang_inflight.extensions.saves.stream import (
    FORMAT,
    Connection,
    Described,
    Head,
    Kind,
    Listener,
    naming,
)
from sglang_inflight.vocabulary.errors import Conflict, Refused

TOKEN = "a" * 64
HEAD = Head(FORMAT, "o", "v1", {"dtype": "bf16"}, [Described("w", "torch.bfloat16", (2, 3))], {})


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", TOKEN)
    yield listener
    listener.close()


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection, and the raw socket of its other side."""
    server = socket.create_server(("127.0.0.1", 0))
    raw = socket.create_connection(server.getsockname())
    ours, _ = server.accept()
    connection = Connection(ours)
    yield connection, raw
    connection.close()
    raw.close()
    server.close()


def dial(listener: Listener) -> socket.socket:
    return socket.create_connection((listener.host, listener.port), timeout=60)


def await_connection(listener: Listener) -> Connection:
    while (found := listener.poll(60)) is None:
        pass
    return found


def frame(kind: int, content: bytes, *, length: int | None = None) -> bytes:
    size = len(content) if length is None else length
    return bytes([kind]) + size.to_bytes(8, "little") + content


# ---- listening -------------------------------------------------------------------------


def test_token_in_pieces_opens_the_connection(listener: Listener) -> None:
    caller = dial(listener)
    for at in range(0, len(TOKEN), 16):
        assert listener.poll(0) is None
        caller.sendall(TOKEN[at : at + 16].encode())
    await_connection(listener).tell("enough")
    assert caller.recv(1) == bytes([Kind.WHY])
    caller.close()


@pytest.mark.parametrize("said", ["b" * 64, "a" * 63 + "b", "GET / HTTP/1.1\r\n" * 8])
def test_connection_without_the_token_is_closed(listener: Listener, said: str) -> None:
    caller = dial(listener)
    caller.sendall(said.encode())
    ended = threading.Event()

    def wait() -> None:
        # a reset if more came than a token has
        with caller, suppress(ConnectionResetError):
            assert caller.recv(1) == b""
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    while not ended.wait(0.01):
        assert listener.poll(0.01) is None


def test_caller_that_leaves_amid_its_token_is_forgotten(listener: Listener) -> None:
    with dial(listener) as caller:
        caller.sendall(TOKEN[:10].encode())
    honest = Call(lambda: Connection.to(listener.host, listener.port, TOKEN))
    await_connection(listener).close()
    honest.result().close()
    assert not listener._strangers


def test_strangers_delay_no_receiver(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MOST_STRANGERS", 2)
    strangers = [dial(listener) for _ in range(3)]
    for _ in strangers:
        listener.poll(60)
    # the first one was closed for the third one
    assert strangers[0].recv(1) == b""
    honest = Call(lambda: Connection.to(listener.host, listener.port, TOKEN))
    await_connection(listener).close()
    honest.result().close()
    for stranger in strangers:
        stranger.close()


def test_silent_stranger_is_closed_in_time(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_TOKEN_S", 0.0)
    with dial(listener) as stranger:
        listener.poll(60)
        assert stranger.recv(1) == b""


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(Refused, match=r"no rank can listen at 203\.0\.113\.7"):
        Listener("203.0.113.7", TOKEN)


# ---- frames ----------------------------------------------------------------------------


class Call:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._found.append(call()), daemon=True)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(60)
        return self._found[0]


def test_frames_come_as_they_were_sent(listener: Listener) -> None:
    receiving = Call(lambda: Connection.to(listener.host, listener.port, TOKEN))
    sender = await_connection(listener)
    receiver: Connection = receiving.result()
    content = bytes(range(256)) * 64

    def send() -> None:
        sender.send(Kind.HEAD, msgspec.json.encode(HEAD))
        sender.send(Kind.PIECE, content[:9000])
        sender.send(Kind.PIECE, content[9000:])
        sender.send(Kind.DIGEST, b"0123456789abcdef")
        sender.send(Kind.END, b"fedcba9876543210")

    sending = Call(send)
    assert receiver.receive_head() == HEAD
    whole = bytearray(len(content))
    spent: list[int] = []
    receiver.receive_into(memoryview(whole), spent.append)
    assert (bytes(whole), spent) == (content, [9000, len(content) - 9000])
    # a tensor without elements has no piece
    receiver.receive_into(memoryview(bytearray()), spent.append)
    assert receiver.receive_digest(Kind.DIGEST) == "0123456789abcdef"
    assert receiver.receive_digest(Kind.END) == "fedcba9876543210"
    sending.result()
    sender.tell("the version has moved on")
    with pytest.raises(Conflict, match="moved on"):
        receiver.receive_digest(Kind.END)
    sender.close()
    with pytest.raises(ConnectionError):
        receiver.receive_digest(Kind.END)
    receiver.close()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (frame(Kind.HEAD, b"", length=1 << 60), "HEAD has"),
        (frame(Kind.PIECE, b"abc"), "HEAD was due"),
        (frame(99, b"abc"), "kind 99"),
        (frame(Kind.WHY, b"", length=1 << 30), "kind 5"),
        (b"HTTP/1.1 200 OK\r\n", "kind 72"),
        (frame(Kind.HEAD, b"{}"), "format"),
        (frame(Kind.HEAD, b"[" * 100_000), "cannot be read"),
        (frame(Kind.HEAD, msgspec.json.encode(HEAD).replace(b"v1", b"v\\u0000")), "printable"),
    ],
)
def test_head_that_is_none_is_refused(
    pair: tuple[Connection, socket.socket], sent: bytes, words: str
) -> None:
    connection, raw = pair
    raw.sendall(sent)
    with pytest.raises(Refused, match=words):
        connection.receive_head()


@pytest.mark.parametrize("length", [0, 5, 1 << 62])
def test_piece_larger_than_its_tensor_is_refused(
    pair: tuple[Connection, socket.socket], length: int
) -> None:
    connection, raw = pair
    raw.sendall(frame(Kind.PIECE, b"", length=length))
    whole = bytearray(4)
    with pytest.raises(Refused, match=f"PIECE has {length} bytes"):
        connection.receive_into(memoryview(whole), lambda _: None)
    assert whole == bytearray(4)


def test_digest_that_is_none_is_refused(pair: tuple[Connection, socket.socket]) -> None:
    connection, raw = pair
    raw.sendall(frame(Kind.DIGEST, b"\xff" * 16))
    with pytest.raises(Refused, match="malformed"):
        connection.receive_digest(Kind.DIGEST)


def test_silent_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SILENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        connection = Connection.to(host, port, TOKEN)
        with (
            pytest.raises(Conflict, match=rf"rank pp0-tp1 \({host}:{port}\) has been silent"),
            naming("pp0-tp1", host, port),
        ):
            connection.receive_head()
        connection.close()
    with (
        pytest.raises(Conflict, match=f"{port}.*refused"),
        naming("pp0-tp1", host, port),
    ):
        Connection.to(host, port, TOKEN)


def test_receiver_that_takes_nothing_ends_its_transfer(
    pair: tuple[Connection, socket.socket],
) -> None:
    connection, _ = pair
    connection._socket.settimeout(0.05)
    content = bytes(8 << 20)

    def send_on() -> None:
        while True:
            connection.send(Kind.PIECE, content)

    with pytest.raises(TimeoutError):
        send_on()


def test_close_ends_a_call_of_another_thread(pair: tuple[Connection, socket.socket]) -> None:
    connection, _ = pair
    failed: list[BaseException] = []
    begun = threading.Event()

    def receive() -> None:
        begun.set()
        try:
            connection.receive_head()
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    begun.wait()
    connection.close()
    thread.join(60)
    assert len(failed) == 1
