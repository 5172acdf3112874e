"""Nodes that are not alike, addresses that they meet at, and what comes to the first of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from sglang.srt.managers.io_struct import sock_recv

from sglang_inflight import messages
from sglang_inflight.messages import Done, Failed, Pulse, RankIsSilent, StatusCall
from sglang_inflight.scheduler.nodes.address import choose_address
from sglang_inflight.scheduler.nodes.meeting import describe_this_node, find_difference
from sglang_inflight.scheduler.nodes.relay import SILENCE_S, TELL_S, Relay

HERE = {"sglang-inflight": "0.1.0 (aa)", "SGLANG_INFLIGHT_STAGING": "auto"}
encode = msgspec.msgpack.Encoder().encode


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (None, ["node 1 did not say within", "install the same sglang-inflight"]),
        ({**HERE, "sglang-inflight": "0.1.0 (bb)"}, ["0.1.0 (aa) on node 0", "(bb) on node 1"]),
        ({**HERE, "SGLANG_INFLIGHT_STAGING": "off"}, ["STAGING is auto on node 0 and off on"]),
        ({"sglang-inflight": "0.1.0 (aa)"}, ["STAGING is auto on node 0 and None on node 1"]),
    ],
)
def test_nodes_that_are_not_alike(there: dict[str, str] | None, words: list[str]) -> None:
    sentence = find_difference({0: HERE, 1: there})
    assert sentence is not None
    for word in words:
        assert word in sentence


def test_nodes_that_are_alike() -> None:
    assert find_difference({0: HERE, 1: dict(HERE)}) is None
    assert find_difference({0: describe_this_node(), 1: describe_this_node()}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STAGING", "off"),
        ("MAX_VERSION_LAG", "1"),
        ("PD_MISMATCH", "abort"),
        ("REQUIRE_UPDATE", "1"),
    ],
)
def test_settings_by_which_ranks_step(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    here = describe_this_node()
    monkeypatch.setenv(f"SGLANG_INFLIGHT_{name}", value)
    sentence = find_difference({0: here, 1: describe_this_node()})
    assert f"SGLANG_INFLIGHT_{name} is" in (sentence or "")


@pytest.mark.parametrize(
    ("meeting", "bound", "told", "is_ipv6"),
    [
        ("127.0.0.1:5000", "127.0.0.1", "127.0.0.1", False),
        ("localhost:5000", "127.0.0.1", "127.0.0.1", False),
        ("[::1]:5000", "[::1]", "[::1]", True),
    ],
)
def test_the_interface_that_the_nodes_meet_on(
    meeting: str, bound: str, told: str, is_ipv6: bool
) -> None:
    address = choose_address(meeting)
    assert (address.bound, address.told, address.is_ipv6) == (bound, told, is_ipv6)


def test_a_name_that_means_the_loopback_here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_inflight.scheduler.nodes import address

    monkeypatch.setattr(address, "_own_address_towards", lambda host, port: "127.0.1.1")
    chosen = choose_address("head-node:5000")
    assert (chosen.bound, chosen.told) == ("0.0.0.0", "head-node")


class Relayed:
    """A relay whose front end is a socket of the test, as is ``node``."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        messages.make_known()
        self._front_end = context.socket(zmq.PULL)
        self._front_end.bind("inproc://front-end")
        sending = context.socket(zmq.PUSH)
        sending.connect("inproc://front-end")
        listening = context.socket(zmq.PULL)
        listening.bind("inproc://relay")
        self.node = context.socket(zmq.PUSH)
        self.node.connect("inproc://relay")
        self.relay = Relay(sending, listening)

    def heard(self) -> list[Any]:
        """By the front end."""
        found = []
        while self._front_end.poll(0):
            found.append(sock_recv(self._front_end))
        return found


@pytest.fixture
def relayed() -> Iterator[Relayed]:
    context: zmq.Context[Any] = zmq.Context()
    yield Relayed(context)
    context.destroy(linger=0)


def test_answers_are_handed_on(relayed: Relayed) -> None:
    answer = Failed(call_id="one", tp_rank=1, message="no", error="Conflict")
    relayed.relay.take([relayed.relay.token, encode(answer)], 0.0)
    assert relayed.heard() == [answer]


@pytest.mark.parametrize("own_token", [True, False])
@pytest.mark.parametrize(
    "content", [b"", b"\xc1", encode(StatusCall()), encode(["PickleWrapper", b"cos\n"])]
)
def test_what_is_no_answer_is_dropped(
    relayed: Relayed, content: bytes, own_token: bool, caplog: pytest.LogCaptureFixture
) -> None:
    relay = relayed.relay
    relay.take([relay.token if own_token else b"x" * 32, content], 0.0)
    relay.take([content], 0.0)
    relay.take([], 0.0)
    assert relayed.heard() == []
    relay.look(TELL_S + 1)
    assert "3 messages came" in caplog.text


def test_an_answer_without_the_token_is_dropped(relayed: Relayed) -> None:
    relayed.relay.take([b"x" * 32, encode(Done(call_id="one"))], 0.0)
    relayed.relay.take([encode(Done(call_id="one"))], 0.0)
    assert relayed.heard() == []


def test_silence_is_told_once_and_its_end_too(relayed: Relayed) -> None:
    relay, pulse = relayed.relay, encode(Pulse(dp_rank=0, pp_rank=0, tp_rank=1))
    began = time.monotonic()
    relay.take([relay.token, pulse], began)
    relay.look(began + SILENCE_S)
    assert relayed.heard() == []
    for _ in range(2):
        relay.look(began + SILENCE_S + 1)
    assert relayed.heard() == [RankIsSilent(tp_rank=1, for_s=SILENCE_S)]
    relay.take([relay.token, pulse], began + SILENCE_S + 2)
    assert relayed.heard() == [RankIsSilent(tp_rank=1, for_s=None)]


def test_what_was_said_while_the_relay_was_held_up_is_heard_first(relayed: Relayed) -> None:
    relay, long_ago = relayed.relay, time.monotonic() - SILENCE_S - 1
    pulses = [[relay.token, encode(Pulse(tp_rank=rank))] for rank in (1, 2)]
    for pulse in pulses:
        relay.take(pulse, long_ago)
    for pulse in pulses:
        relayed.node.send_multipart(pulse)
    relay.listen()
    relay.look(time.monotonic())
    assert relayed.heard() == []


def test_strangers_keep_nobody_from_looking(
    relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_inflight.scheduler.nodes.relay.MOST_AT_ONCE", 2)
    for frames in ([b""], [b""], [relayed.relay.token, encode(Done(call_id="one"))]):
        relayed.node.send_multipart(frames)
    relayed.relay.listen()
    assert relayed.heard() == []
    relayed.relay.listen()
    assert relayed.heard() == [Done(call_id="one")]
