"""Relays the answers of ranks on further nodes to the front end.

The relay runs in the first rank. Other nodes connect to a TCP port, and so may strangers. The
handshake is ZeroMQ's CURVE: with its first message a client proves that it has the listening
socket's public key. The key never crosses the port: ranks get it by SGLang's own collective. libzmq
refuses older protocols, other mechanisms and other keys. libzmq ends a connection without a
handshake after ``HANDSHAKE_S``, and until then buffers one frame of at most ``FRAME_BYTES``.

So a stranger at the port can neither send an answer, nor read one, nor fill this process's memory.
A stranger can open connections faster than ``HANDSHAKE_S`` ends them. Each holds a file descriptor
and some kilobytes, and costs libzmq's I/O thread a handshake: answers then come late. A reader of
the collectives' traffic can read the key, as all else between ranks. SGLang already requires that
network to be private.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

import msgspec
import zmq
from sglang.srt.managers.io_struct import sock_send
from sglang.srt.utils.network import NetworkAddress, get_local_ip_auto, get_zmq_socket

from sglang_inflight.messages import GenerationContinues, Pulse, RankAnswer, RankIsSilent, answers
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.unsupported import Unsupported

logger = logging.getLogger(__name__)

# A longer answer comes in several frames. libzmq ends a connection that announces a frame larger
# than this plus CURVE's overhead.
FRAME_BYTES = 32 << 10
_CURVE_ADDS = 256
# time limit of a connection's handshake
HANDSHAKE_S = 5.0
# Time after which a rank counts as silent. Ranks send a pulse every second.
SILENCE_S = 15.0
# time between two checks for silent ranks, and between two warnings about strangers
CHECK_S = 1.0
WARN_EVERY_S = 60.0
# most messages between two checks, so that a stranger's flood cannot keep the relay from checking
MOST_AT_ONCE = 10_000

Rank = tuple[int, int, int]


class RelayAddress(NamedTuple):
    """``key`` is the listening socket's public key for CURVE, in Z85. Only ranks may know it."""

    endpoint: str
    key: bytes


class RelaySocket(NamedTuple):
    """The listening socket for other nodes, and its monitor for ended connections."""

    listening: zmq.Socket[bytes]
    ends: zmq.Socket[bytes]
    address: RelayAddress


class Relay:
    """Relays the socket's messages, on its own thread. Only this thread uses the sockets.

    The first rank's loop cannot do it: it may wait in a collective for the silent rank. Any
    message but our answers is dropped, and no message is unpickled.
    """

    def __init__(self, front_end: zmq.Socket[bytes], relay_socket: RelaySocket) -> None:
        self._front_end = front_end
        self._listening, self._ends, _ = relay_socket
        self._poller = zmq.Poller()
        self._poller.register(self._listening, zmq.POLLIN)
        self._poller.register(self._ends, zmq.POLLIN)
        self._decode = msgspec.msgpack.Decoder(_any_message()).decode
        # time.monotonic() of each rank's last message
        self._last_message_at: dict[Rank, float] = {}
        self._silent: set[Rank] = set()
        self._ended = 0
        self._no_answers = 0
        self._warned_at = -WARN_EVERY_S

    @classmethod
    def start(cls, ipc_name: str) -> RelayAddress:
        """Start the relay's thread. ``ipc_name`` is the front end's socket."""
        context: zmq.Context[Any] = zmq.Context(1)
        relay_socket = open_relay_socket(context, choose_address(get_parallel().dist_init_addr))
        socket: Any = get_zmq_socket(context, zmq.PUSH, ipc_name, False)
        relay = cls(socket, relay_socket)
        threading.Thread(target=relay._run, name="relay", daemon=True).start()
        logger.info("Ranks of other nodes answer at %s", relay_socket.address.endpoint)
        return relay_socket.address

    def _run(self) -> None:
        while True:
            try:
                self.listen()
                self.check_silence(time.monotonic())
            except Exception:
                # keep the thread: without it no other node's answer would arrive
                logger.exception("A message of another node could not be relayed")

    def listen(self) -> None:
        """Take all queued messages, before ``check_silence`` decides that a rank is silent.

        There may be many if this thread was delayed.
        """
        self._poller.poll(int(1000 * CHECK_S))
        for _ in range(MOST_AT_ONCE):
            if not self._ends.poll(0):
                break
            self._ends.recv_multipart()
            self._ended += 1
        for _ in range(MOST_AT_ONCE):
            if not self._listening.poll(0):
                break
            self.take(self._listening.recv_multipart(), time.monotonic())

    def take(self, frames: list[bytes], now: float) -> None:
        """Relay one message if it is an answer. ``frames`` are its parts."""
        said = self._read(frames)
        if said is None:
            self._no_answers += 1
            return
        if isinstance(said, RankAnswer):
            rank = said.dp_rank, said.pp_rank, said.tp_rank
            self._last_message_at[rank] = now
            if rank in self._silent:
                self._silent.discard(rank)
                self._report_silence(rank, is_silent=False)
        if not isinstance(said, Pulse):
            sock_send(self._front_end, said)

    def _read(self, frames: list[bytes]) -> RankAnswer | GenerationContinues | None:
        try:
            said: RankAnswer | GenerationContinues = self._decode(b"".join(frames))
        except (msgspec.DecodeError, RecursionError):
            return None
        return said

    def check_silence(self, now: float) -> None:
        """Report silent ranks to the front end, and warn about strangers."""
        for rank, last in self._last_message_at.items():
            if now - last > SILENCE_S and rank not in self._silent:
                self._silent.add(rank)
                self._report_silence(rank, is_silent=True)
        if (self._ended or self._no_answers) and now - self._warned_at > WARN_EVERY_S:
            logger.warning(
                "%d connections ended at the port for this server's other nodes, and %d messages "
                "there were not answers. They changed nothing. A connection ends if it does not "
                "show this server's key within %g s, or if its node is gone. Let only this "
                "server's nodes reach the port.",
                self._ended,
                self._no_answers,
                HANDSHAKE_S,
            )
            self._ended, self._no_answers, self._warned_at = 0, 0, now

    def _report_silence(self, rank: Rank, *, is_silent: bool) -> None:
        dp_rank, pp_rank, tp_rank = rank
        sock_send(
            self._front_end,
            RankIsSilent(
                dp_rank=dp_rank,
                pp_rank=pp_rank,
                tp_rank=tp_rank,
                for_s=SILENCE_S if is_silent else None,
            ),
        )


def open_relay_socket(context: zmq.Context[Any], address: Address) -> RelaySocket:
    """Listen on a port for this server's nodes only.

    Raise ``Unsupported`` if libzmq was built without CURVE.
    """
    if not zmq.has("curve"):
        raise Unsupported(
            "SGLang Inflight needs a libzmq with CURVE for --nnodes above 1, and this pyzmq has "
            "none: install pyzmq's own wheel (pip install --force-reinstall pyzmq)"
        )
    listening = context.socket(zmq.PULL)
    key, secret = zmq.curve_keypair()
    listening.curve_server = True
    listening.curve_secretkey = secret
    listening.maxmsgsize = FRAME_BYTES + _CURVE_ADDS
    listening.handshake_ivl = int(1000 * HANDSHAKE_S)
    listening.ipv6 = address.is_ipv6
    ends = _watch_ends(context, listening)
    port = listening.bind_to_random_port(f"tcp://{address.bound}")
    return RelaySocket(listening, ends, RelayAddress(f"tcp://{address.announced}:{port}", key))


def _watch_ends(context: zmq.Context[Any], listening: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Return a socket that receives a message for each ended connection.

    libzmq has an event for a failed handshake, but none for a frame that is too large.
    """
    endpoint = "inproc://ended-at-the-relay"
    listening.monitor(endpoint, zmq.EVENT_DISCONNECTED)
    ends = context.socket(zmq.PAIR)
    # a full queue would block libzmq's I/O thread, and with it all answers
    ends.rcvhwm = 0
    ends.connect(endpoint)
    return ends


def _any_message() -> Any:
    """Return the type of what other nodes send."""
    return Union[(*answers(), Pulse, GenerationContinues)]


@dataclass(frozen=True)
class Address:
    """``bound`` is the listening address, ``announced`` is the address for other nodes.

    An IPv6 address is in brackets, as in a URL.
    """

    bound: str
    announced: str
    is_ipv6: bool


def choose_address(dist_init_addr: str | None) -> Address:
    """Return the interface of the nodes' rendezvous, ``dist_init_addr``.

    Only this interface listens. Many machines resolve their own name to the loopback, while
    other nodes resolve it to another interface. In that case all interfaces listen.
    """
    if dist_init_addr is None:
        return _plain(get_local_ip_auto())
    meeting = NetworkAddress.parse(dist_init_addr)
    own = _own_address_towards(meeting.host, meeting.port)
    if ipaddress.ip_address(own).is_loopback and not _means_this_machine(meeting.host):
        is_ipv6 = ":" in own
        return Address("[::]" if is_ipv6 else "0.0.0.0", meeting.host, is_ipv6)
    return _plain(own)


def _plain(ip: str) -> Address:
    is_ipv6 = ":" in ip
    host = f"[{ip}]" if is_ipv6 else ip
    return Address(host, host, is_ipv6)


def _own_address_towards(host: str, port: int) -> str:
    """Return the source address of packets to ``host``. No packet is sent."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sender:
        sender.connect(where)
        own: str = sender.getsockname()[0]
    return own


def _means_this_machine(host: str) -> bool:
    """Return whether ``host`` means the loopback on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
