"""Answers of ranks on other nodes, handed on to the front end by the first rank."""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time
from typing import Any, NamedTuple, Union

import msgspec
import zmq
from sglang.srt.managers.io_struct import sock_send
from sglang.srt.utils.network import get_zmq_socket

from sglang_inflight.messages import ANSWERS, GenerationContinues, Pulse, RankAnswer, RankIsSilent
from sglang_inflight.scheduler.nodes.address import choose_address
from sglang_inflight.upstream.runtime_context import get_parallel

logger = logging.getLogger(__name__)

# Larger ones are no answers, and libzmq ends the connection that they come by.
MOST_BYTES = 16 << 20
# How long a rank may say nothing. It says something once a second.
SILENCE_S = 15.0
# how often it is looked who is silent, and told that strangers came
LOOK_S = 1.0
TELL_S = 60.0
# messages between two looks, so that strangers who send without end keep nobody from looking
MOST_AT_ONCE = 10_000

Rank = tuple[int, int, int]


class Whereabouts(NamedTuple):
    endpoint: str
    token: bytes


class Relay:
    """A socket that other nodes can connect to, and the thread that alone uses it.

    A thread, because the loop of the first rank may wait in a collective for the very rank
    that is silent. Anybody may connect. What comes without the token, or is no answer of ours,
    is dropped before anything is made of it, and nothing that comes is ever unpickled.
    """

    def __init__(self, front_end: zmq.Socket[bytes], listening: zmq.Socket[bytes]) -> None:
        self.token = secrets.token_bytes(32)
        self._front_end = front_end
        self._listening = listening
        self._decode = msgspec.msgpack.Decoder(_ANY_ANSWER).decode
        # when each rank was heard of last, in ``time.monotonic()``
        self._heard: dict[Rank, float] = {}
        self._silent: set[Rank] = set()
        self._strangers = 0
        self._told_at = -TELL_S

    @classmethod
    def start(cls, ipc_name: str) -> Whereabouts:
        """``ipc_name`` is the front end's socket."""
        context: zmq.Context[Any] = zmq.Context(1)
        address = choose_address(get_parallel().dist_init_addr)
        listening = context.socket(zmq.PULL)
        listening.maxmsgsize = MOST_BYTES
        listening.ipv6 = address.is_ipv6
        port = listening.bind_to_random_port(f"tcp://{address.bound}")
        relay = cls(get_zmq_socket(context, zmq.PUSH, ipc_name, False), listening)
        threading.Thread(target=relay._run, name="relay", daemon=True).start()
        logger.info("Ranks of other nodes answer at %s:%d", address.told, port)
        return Whereabouts(f"tcp://{address.told}:{port}", relay.token)

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
        if not self._listening.poll(int(1000 * LOOK_S)):
            return
        for _ in range(MOST_AT_ONCE):
            self.take(self._listening.recv_multipart(), time.monotonic())
            if not self._listening.poll(0):
                return

    def take(self, frames: list[bytes], now: float) -> None:
        """Hand on what is an answer."""
        said = self._read(frames)
        if said is None:
            self._strangers += 1
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
        if len(frames) != 2 or not hmac.compare_digest(frames[0], self.token):
            return None
        try:
            said: RankAnswer | GenerationContinues = self._decode(frames[1])
        except (msgspec.DecodeError, RecursionError):
            return None
        return said

    def look(self, now: float) -> None:
        """Who has been silent for too long?"""
        for rank, heard in self._heard.items():
            if now - heard > SILENCE_S and rank not in self._silent:
                self._silent.add(rank)
                self._tell(rank, is_silent=True)
        if self._strangers and now - self._told_at > TELL_S:
            logger.warning(
                "%d messages came without this server's token, or were no answers. Whoever sent "
                "them has changed nothing.",
                self._strangers,
            )
            self._strangers, self._told_at = 0, now

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


_ANY_ANSWER: Any = Union[(*ANSWERS, Pulse, GenerationContinues)]
