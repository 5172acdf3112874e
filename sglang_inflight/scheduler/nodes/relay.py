"""Answers of ranks on other nodes, handed on to the front end by the first rank.

Other nodes reach a TCP port, and so may strangers. The handshake is ZeroMQ's CURVE: a client
proves with its first message that it has the listening socket's public key, which never crosses
the port and which the ranks get by SGLang's own collective. libzmq refuses older protocols, other
mechanisms and other keys, and a connection that has not shaken hands within ``HANDSHAKE_S``.
Until then it holds one frame of at most ``FRAME_BYTES`` for a connection.

So a stranger at the port can neither send an answer, nor read one, nor fill this process's memory.
A stranger can still open connections faster than ``HANDSHAKE_S`` ends them, each of which holds a
file descriptor and some kilobytes, and can make libzmq's I/O thread compute handshakes: answers
then come late. Whoever reads the traffic of SGLang's collectives reads the key there, as all else
that ranks tell each other: that network has to be private, as SGLang demands.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, NamedTuple, Union

import msgspec
import zmq
from sglang.srt.managers.io_struct import sock_send
from sglang.srt.utils.network import get_zmq_socket

from sglang_inflight.messages import ANSWERS, GenerationContinues, Pulse, RankAnswer, RankIsSilent
from sglang_inflight.scheduler.nodes.address import Address, choose_address
from sglang_inflight.sglang_types.runtime_context import get_parallel
from sglang_inflight.unsupported import Unsupported

logger = logging.getLogger(__name__)

# A longer answer comes in several frames. libzmq ends a connection that announces a frame larger
# than this and what CURVE adds to it.
FRAME_BYTES = 32 << 10
_CURVE_ADDS = 256
# how long a connection may take for its handshake
HANDSHAKE_S = 5.0
# How long a rank may say nothing. It says something once a second.
SILENCE_S = 15.0
# how often it is looked who is silent, and told that strangers came
LOOK_S = 1.0
TELL_S = 60.0
# messages between two looks, so that strangers who send without end keep nobody from looking
MOST_AT_ONCE = 10_000

Rank = tuple[int, int, int]


class Whereabouts(NamedTuple):
    """``key`` is the listening socket's public key for CURVE, in Z85. Only ranks may know it."""

    endpoint: str
    key: bytes


class Door(NamedTuple):
    """The socket that other nodes connect to, and one that hears when a connection ends."""

    listening: zmq.Socket[bytes]
    ends: zmq.Socket[bytes]
    whereabouts: Whereabouts


class Relay:
    """Hands on what comes by the door, on the thread that alone uses its sockets.

    A thread, because the loop of the first rank may wait in a collective for the very rank
    that is silent. What is no answer of ours is dropped, and nothing that comes is unpickled.
    """

    def __init__(self, front_end: zmq.Socket[bytes], door: Door) -> None:
        self._front_end = front_end
        self._listening, self._ends, _ = door
        self._poller = zmq.Poller()
        self._poller.register(self._listening, zmq.POLLIN)
        self._poller.register(self._ends, zmq.POLLIN)
        self._decode = msgspec.msgpack.Decoder(_ANY_ANSWER).decode
        # when each rank was heard of last, in ``time.monotonic()``
        self._heard: dict[Rank, float] = {}
        self._silent: set[Rank] = set()
        self._ended = 0
        self._no_answers = 0
        self._told_at = -TELL_S

    @classmethod
    def start(cls, ipc_name: str) -> Whereabouts:
        """``ipc_name`` is the front end's socket."""
        context: zmq.Context[Any] = zmq.Context(1)
        door = open_door(context, choose_address(get_parallel().dist_init_addr))
        relay = cls(get_zmq_socket(context, zmq.PUSH, ipc_name, False), door)
        threading.Thread(target=relay._run, name="relay", daemon=True).start()
        logger.info("Ranks of other nodes answer at %s", door.whereabouts.endpoint)
        return door.whereabouts

    def _run(self) -> None:
        while True:
            try:
                self.listen()
                self.look(time.monotonic())
            except Exception:
                # no answer of another node would be heard any more
                logger.exception("A message of another node could not be handed on")

    def listen(self) -> None:
        """Take what has come. Where this thread was held up that may be much, and all of it was
        said before anybody is called silent.
        """
        self._poller.poll(int(1000 * LOOK_S))
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
        """Hand on what is an answer. ``frames`` are its parts."""
        said = self._read(frames)
        if said is None:
            self._no_answers += 1
            return
        if isinstance(said, RankAnswer):
            rank = said.dp_rank, said.pp_rank, said.tp_rank
            self._heard[rank] = now
            if rank in self._silent:
                self._silent.discard(rank)
                self._tell(rank, is_silent=False)
        if not isinstance(said, Pulse):
            sock_send(self._front_end, said)

    def _read(self, frames: list[bytes]) -> RankAnswer | GenerationContinues | None:
        try:
            said: RankAnswer | GenerationContinues = self._decode(b"".join(frames))
        except (msgspec.DecodeError, RecursionError):
            return None
        return said

    def look(self, now: float) -> None:
        """Who has been silent for too long?"""
        for rank, heard in self._heard.items():
            if now - heard > SILENCE_S and rank not in self._silent:
                self._silent.add(rank)
                self._tell(rank, is_silent=True)
        if (self._ended or self._no_answers) and now - self._told_at > TELL_S:
            logger.warning(
                "%d connections ended at the port for this server's other nodes, and %d messages "
                "there were no answers. Nothing has changed by them. A connection ends that has "
                "not shown this server's key within %g s, or whose node is gone. Let nobody but "
                "this server's nodes reach the port.",
                self._ended,
                self._no_answers,
                HANDSHAKE_S,
            )
            self._ended, self._no_answers, self._told_at = 0, 0, now

    def _tell(self, rank: Rank, *, is_silent: bool) -> None:
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


def open_door(context: zmq.Context[Any], address: Address) -> Door:
    """A port for the nodes of this server, and for nobody else. Raises ``Unsupported`` where
    libzmq was built without CURVE.
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
    ends = _hear_ends(context, listening)
    port = listening.bind_to_random_port(f"tcp://{address.bound}")
    return Door(listening, ends, Whereabouts(f"tcp://{address.told}:{port}", key))


def _hear_ends(context: zmq.Context[Any], listening: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A message for each connection that ends. libzmq says of a handshake that it failed, but not
    where a frame was too large.
    """
    endpoint = "inproc://ended-at-the-relay"
    listening.monitor(endpoint, zmq.EVENT_DISCONNECTED)
    ends = context.socket(zmq.PAIR)
    # libzmq's I/O thread waits where this queue is full, and no answer would come in meanwhile
    ends.rcvhwm = 0
    ends.connect(endpoint)
    return ends


_ANY_ANSWER: Any = Union[(*ANSWERS, Pulse, GenerationContinues)]
