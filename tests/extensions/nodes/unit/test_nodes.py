"""Consistency checks of nodes, the address of their meeting, and the relay on the first node."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from sglang.srt.managers.io_struct import sock_recv

from sglang_inflight import messages
from sglang_inflight.extensions.nodes.check import describe_this_node, find_difference
from sglang_inflight.extensions.nodes.relay import (
    FRAME_BYTES,
    SILENCE_S,
    WARN_EVERY_S,
    Address,
    Relay,
    RelayAddress,
    RelaySocket,
    choose_address,
    open_relay_socket,
)
from sglang_inflight.extensions.nodes.replies import RemoteReplies
from sglang_inflight.messages import Done, Failed, Pulse, RankIsSilent, StatusCall
from sglang_inflight.unsupported import Unsupported

HERE = {"sglang-inflight": "0.1.0 (aa)", "SGLANG_INFLIGHT_STAGING": "auto"}
encode = msgspec.msgpack.Encoder().encode


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (None, ["node 1 did not report", "install the same sglang-inflight"]),
        ({**HERE, "sglang-inflight": "0.1.0 (bb)"}, ["0.1.0 (aa) on node 0", "(bb) on node 1"]),
        ({**HERE, "SGLANG_INFLIGHT_STAGING": "off"}, ["STAGING is auto on node 0 and off on"]),
        ({"sglang-inflight": "0.1.0 (aa)"}, ["STAGING is auto on node 0 and None on node 1"]),
    ],
)
def test_difference_between_nodes_is_named(there: dict[str, str] | None, words: list[str]) -> None:
    sentence = find_difference({0: HERE, 1: there})
    assert sentence is not None
    for word in words:
        assert word in sentence


def test_equal_nodes_have_no_difference() -> None:
    assert find_difference({0: HERE, 1: dict(HERE)}) is None
    assert find_difference({0: describe_this_node(), 1: describe_this_node()}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STAGING", "off"),
        ("MAX_VERSION_LAG", "1"),
        ("PD_MISMATCH", "abort"),
        ("PREVIOUS_EVERY", "2"),
        ("REQUIRE_UPDATE", "1"),
    ],
)
def test_settings_must_match_between_nodes(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    here = describe_this_node()
    monkeypatch.setenv(f"SGLANG_INFLIGHT_{name}", value)
    sentence = find_difference({0: here, 1: describe_this_node()})
    assert f"SGLANG_INFLIGHT_{name} is" in (sentence or "")


@pytest.mark.parametrize(
    ("meeting", "bound", "announced", "is_ipv6"),
    [
        ("127.0.0.1:5000", "127.0.0.1", "127.0.0.1", False),
        ("localhost:5000", "127.0.0.1", "127.0.0.1", False),
        ("[::1]:5000", "[::1]", "[::1]", True),
    ],
)
def test_relay_binds_meeting_interface(
    meeting: str, bound: str, announced: str, is_ipv6: bool
) -> None:
    address = choose_address(meeting)
    assert (address.bound, address.announced, address.is_ipv6) == (bound, announced, is_ipv6)


def test_local_loopback_name_binds_all_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_inflight.extensions.nodes import relay as nodes

    monkeypatch.setattr(nodes, "_own_address_towards", lambda host, port: "127.0.1.1")
    chosen = choose_address("head-node:5000")
    assert (chosen.bound, chosen.announced) == ("0.0.0.0", "head-node")


class Relayed:
    """A relay with test sockets for its front end and for ``node``."""

    def __init__(
        self, context: zmq.Context[Any], relay_socket: RelaySocket, node: zmq.Socket[bytes]
    ) -> None:
        messages.make_known()
        self._front_end = context.socket(zmq.PULL)
        self._front_end.bind("inproc://front-end")
        sending = context.socket(zmq.PUSH)
        sending.connect("inproc://front-end")
        self.relay_socket = relay_socket
        self.node = node
        self.relay = Relay(sending, relay_socket)

    def received(self) -> list[Any]:
        """Return the messages received by the front end."""
        found = []
        while self._front_end.poll(0):
            found.append(sock_recv(self._front_end))
        return found


@pytest.fixture
def relayed() -> Iterator[Relayed]:
    """A relay whose node's messages arrive at once."""
    context: zmq.Context[Any] = zmq.Context()
    listening, ends = context.socket(zmq.PULL), context.socket(zmq.PAIR)
    listening.bind("inproc://relay")
    node = context.socket(zmq.PUSH)
    node.connect("inproc://relay")
    yield Relayed(context, RelaySocket(listening, ends, RelayAddress("", b"")), node)
    context.destroy(linger=0)


@pytest.fixture
def reachable() -> Iterator[Relayed]:
    """A relay on a port open to strangers."""
    context: zmq.Context[Any] = zmq.Context()
    relay_socket = open_relay_socket(context, LOOPBACK)
    yield Relayed(context, relay_socket, connect_node(context, relay_socket.address))
    context.destroy(linger=0)


LOOPBACK = Address("127.0.0.1", "127.0.0.1", is_ipv6=False)


def connect_node(context: zmq.Context[Any], where: RelayAddress) -> zmq.Socket[bytes]:
    """Open a socket like another node's."""
    node = context.socket(zmq.PUSH)
    node.curve_serverkey = where.key
    node.curve_publickey, node.curve_secretkey = zmq.curve_keypair()
    node.connect(where.endpoint)
    return node


def connect_stranger(relayed: Relayed) -> socket.socket:
    """Open a TCP connection to the relay's port without ZeroMQ."""
    port = int(relayed.relay_socket.address.endpoint.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def test_relay_passes_answers_on(relayed: Relayed) -> None:
    answer = Failed(call_id="one", tp_rank=1, message="no", error="Conflict")
    relayed.relay.take([encode(answer)], 0.0)
    assert relayed.received() == [answer]


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", encode(StatusCall()), encode(["PickleWrapper", b"cos\n"])]
)
def test_relay_drops_and_counts_other_messages(
    relayed: Relayed, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    relay = relayed.relay
    relay.take([content], 0.0)
    relay.take([content, content], 0.0)
    relay.take([], 0.0)
    assert relayed.received() == []
    relay.check_silence(WARN_EVERY_S + 1)
    assert "3 messages there were not answers" in caplog.text


def test_answer_longer_than_a_frame_arrives_whole(
    reachable: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteReplies, "_send_pulses", lambda far: None)
    answer = Failed(call_id="one", tp_rank=1, message="no" * FRAME_BYTES, error="Conflict")
    RemoteReplies(*reachable.relay_socket.address).send(answer)
    assert listen_until_received(reachable) == [answer]


def test_answer_with_wrong_key_is_refused(
    reachable: Relayed, caplog: pytest.LogCaptureFixture
) -> None:
    context: zmq.Context[Any] = zmq.Context()
    public, _ = zmq.curve_keypair()
    stranger = connect_node(context, reachable.relay_socket.address._replace(key=public))
    stranger.send(encode(Done(call_id="stranger")))
    until_logged(reachable, caplog, "connections ended at the port")
    reachable.node.send(encode(Done(call_id="one")))
    assert listen_until_received(reachable) == [Done(call_id="one")]
    context.destroy(linger=0)


def listen_until_received(relayed: Relayed) -> list[Any]:
    while not (received := relayed.received()):
        relayed.relay.listen()
    return received


def until_logged(relayed: Relayed, caplog: pytest.LogCaptureFixture, words: str) -> None:
    now = 0.0
    while words not in caplog.text:
        relayed.relay.listen()
        now += WARN_EVERY_S + 1
        relayed.relay.check_silence(now)


_NULL = b"NULL".ljust(20, b"\0") + bytes(32)
_CURVE = b"CURVE".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
# A frame announcing a great length, and a further frame after it.
_LONG_FRAME = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)
_BARE_FRAME = b"\xff" + ((1 << 20) + 1).to_bytes(8, "big") + b"\x01" + bytes(1 << 20)


@pytest.mark.parametrize(
    ("greeting", "frame"),
    [
        (_SIGNATURE + b"\x03\x00" + _NULL + b"\x04" + bytes([len(_READY)]) + _READY, _LONG_FRAME),
        (_SIGNATURE + b"\x03\x00" + _CURVE, _LONG_FRAME),
        (_SIGNATURE + b"\x01\x08\x00\x00", _LONG_FRAME),
        (_SIGNATURE + b"\x00\x08\x00\x00", _BARE_FRAME),
        (b"\x01\x00", _BARE_FRAME),
    ],
    ids=["NULL", "CURVE", "ZMTP 2", "ZMTP 1", "ZMTP 1 without a version"],
)
def test_oversized_frame_of_a_stranger_is_refused(
    reachable: Relayed, greeting: bytes, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with connect_stranger(reachable) as stranger:
        stranger.sendall(greeting)
        with pytest.raises(ConnectionError):
            stranger.sendall(frame * 64)
    until_logged(reachable, caplog, "1 connections ended at the port")


@pytest.mark.parametrize("words", [b"", _SIGNATURE, _SIGNATURE + b"\x03\x00" + _CURVE])
def test_silent_stranger_is_disconnected(monkeypatch: pytest.MonkeyPatch, words: bytes) -> None:
    monkeypatch.setattr("sglang_inflight.extensions.nodes.relay.HANDSHAKE_S", 0.1)
    context: zmq.Context[Any] = zmq.Context()
    relay_socket = open_relay_socket(context, LOOPBACK)
    relayed = Relayed(context, relay_socket, connect_node(context, relay_socket.address))
    with connect_stranger(relayed) as stranger:
        stranger.sendall(words)
        while stranger.recv(1 << 10):
            pass
    context.destroy(linger=0)


def test_libzmq_without_curve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(Unsupported, match="install pyzmq's own wheel"):
        open_relay_socket(zmq.Context(), LOOPBACK)


def test_silence_and_its_end_are_reported_once(relayed: Relayed) -> None:
    relay, pulse = relayed.relay, encode(Pulse(dp_rank=0, pp_rank=0, tp_rank=1))
    began = time.monotonic()
    relay.take([pulse], began)
    relay.check_silence(began + SILENCE_S)
    assert relayed.received() == []
    for _ in range(2):
        relay.check_silence(began + SILENCE_S + 1)
    assert relayed.received() == [RankIsSilent(tp_rank=1, for_s=SILENCE_S)]
    relay.take([pulse], began + SILENCE_S + 2)
    assert relayed.received() == [RankIsSilent(tp_rank=1, for_s=None)]


def test_delayed_relay_reads_pulses_before_reporting_silence(relayed: Relayed) -> None:
    relay, long_ago = relayed.relay, time.monotonic() - SILENCE_S - 1
    pulses = [[encode(Pulse(tp_rank=rank))] for rank in (1, 2)]
    for pulse in pulses:
        relay.take(pulse, long_ago)
    for pulse in pulses:
        relayed.node.send_multipart(pulse)
    relay.listen()
    relay.check_silence(time.monotonic())
    assert relayed.received() == []


def test_relay_limits_messages_read_at_once(
    relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_inflight.extensions.nodes.relay.MOST_AT_ONCE", 2)
    for frames in ([b""], [b""], [encode(Done(call_id="one"))]):
        relayed.node.send_multipart(frames)
    relayed.relay.listen()
    assert relayed.received() == []
    relayed.relay.listen()
    assert relayed.received() == [Done(call_id="one")]
