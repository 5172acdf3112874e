"""Sends one rank's answers to the front end, on the first node.

A scheduler has one ZeroMQ context for our sockets. libzmq starts a context's threads with its first
socket. Without a free file descriptor for them it aborts the process. So the context's threads
start with the scheduler. A later socket without a file descriptor only raises ``zmq.ZMQError``.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from typing import Any, Protocol

import msgspec
import zmq
from sglang.srt.managers.io_struct import BaseReq, sock_send
from sglang.srt.utils.network import get_zmq_socket, is_zmq_endpoint_ipv6

from sglang_inflight.messages import (
    A,
    Done,
    Failed,
    GenerationContinues,
    InflightCall,
    Pulse,
    RankAnswer,
)
from sglang_inflight.scheduler.collectives import broadcast_from_first_rank_of_all
from sglang_inflight.scheduler.nodes import FRAME_BYTES, Relay
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.topology import is_first_of_replica, own_placement, own_rank
from sglang_inflight.vocabulary.errors import ERRORS, Exhausted, InflightError, Refused

logger = logging.getLogger(__name__)
# time between two pulses of a rank on another node
PULSE_S = 1.0


class AnswerChannel:
    """This rank's own channel to the front end. Used by the scheduler's and staging threads.

    SGLang gives only a replica's first rank a socket, so a failure on another rank would be
    lost. A collective could gather the answers, but a dead rank would then hang the others.
    With a socket per rank, only the front end notices a silent rank.
    """

    def __init__(self, way: ReplyTransport) -> None:
        self._is_first = is_first_of_replica()
        self._dp_rank, self._pp_rank, self._tp_rank = own_rank()
        self._way = way

    def succeed(self, call: InflightCall[A], answer: A) -> None:
        self._send(answer, call.call_id, call.http_worker_ipc)

    def fail(self, call: InflightCall[Any], error: BaseException) -> None:
        """Answer with ``error``. Log the traceback of an unexpected error."""
        if not isinstance(error, InflightError):
            logger.error("%s failed", type(call).__name__, exc_info=error)
        failed = _failed(error, str(error) or repr(error), surprise="RankFailed")
        self._send(failed, call.call_id, call.http_worker_ipc)

    def succeed_request(self, request: BaseReq) -> None:
        """Answer one of SGLang's control requests: this rank's handler has succeeded."""
        assert request.rid is not None
        self._send(Done(), request.rid, request.http_worker_ipc)

    def fail_request(self, request: BaseReq, error: BaseException, message: str) -> None:
        """Answer one of SGLang's control requests: this rank's handler raised ``error``."""
        if request.rid is None:
            return
        failed = _failed(error, message, surprise="HandlerFailed")
        self._send(failed, request.rid, request.http_worker_ipc)

    def send_generation_continues(self) -> None:
        """Tell the front end that generation continues without a call.

        Only a replica's first rank sends.
        """
        if self._is_first:
            self._way.send(GenerationContinues())

    def _send(self, answer: RankAnswer, call_id: str, http_worker_ipc: str | None) -> None:
        answer.call_id, answer.http_worker_ipc = call_id, http_worker_ipc
        answer.dp_rank, answer.tp_rank, answer.pp_rank = self._dp_rank, self._tp_rank, self._pp_rank
        self._way.send(answer)


def sendable(text: str) -> str:
    """Escape lone surrogates in ``text``, because no message can carry them.

    File names and clients' strings may contain them.
    """
    return text.encode(errors="backslashreplace").decode()


def _failed(error: BaseException, message: str, *, surprise: str) -> Failed:
    name = type(error).__name__ if isinstance(error, InflightError) else surprise
    if issubclass(ERRORS[name], Refused) and Exhausted.is_cause_of(error):
        name = Exhausted.__name__
    return Failed(message=sendable(message), error=name)


class ReplyTransport(Protocol):
    """Any thread of the rank may send."""

    def send(self, message: BaseReq) -> None: ...


def find_reply_transport(ipc_name: str) -> ReplyTransport:
    """Return this rank's transport. Only ranks of the front end's node can connect to ``ipc_name``.

    With several nodes this is a collective over all ranks of the replica, on the scheduler's
    thread. So the first rank's key reaches the others by SGLang's private connections.
    """
    placement = own_placement()
    if not placement.has_other_nodes:
        return LocalReplies(ipc_name)
    group = get_parallel().world_group
    relay: list[str | bytes] = []
    if group.rank == group.ranks[0]:
        relay = [*Relay.start(ipc_name)]
    endpoint, key = broadcast_from_first_rank_of_all(relay)
    if placement.is_with_front_end:
        return LocalReplies(ipc_name)
    assert isinstance(endpoint, str)
    assert isinstance(key, bytes)
    return RemoteReplies(endpoint, key)


class LocalReplies:
    """Replies from the front end's own node.

    The scheduler's thread and the staging thread both send. A zmq socket may move between
    threads only through a full memory fence: the lock is one.
    """

    def __init__(self, ipc_name: str) -> None:
        self._socket: Any = get_zmq_socket(zmq_context(), zmq.PUSH, ipc_name, False)
        self._lock = threading.Lock()

    def send(self, message: BaseReq) -> None:
        with self._lock:
            sock_send(self._socket, message)


class RemoteReplies:
    """Replies from another node, over TCP to the relay in the replica's first rank.

    A thread sends a pulse every second, so that the first node can tell a dead rank from an idle
    one. The pulse thread shares the socket under the lock.
    """

    def __init__(self, endpoint: str, key: bytes) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._socket = zmq_context().socket(zmq.PUSH)
        # no limit on queued messages: a dead first node must not block this node's loop
        self._socket.sndhwm = 0
        self._socket.ipv6 = is_zmq_endpoint_ipv6(endpoint)
        self._socket.curve_serverkey = key
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.connect(endpoint)
        self._lock = threading.Lock()
        threading.Thread(target=self._send_pulses, name="pulse", daemon=True).start()

    def send(self, message: BaseReq) -> None:
        content = self._encode(message)
        frames = [content[at : at + FRAME_BYTES] for at in range(0, len(content), FRAME_BYTES)]
        with self._lock:
            self._socket.send_multipart(frames)

    def _send_pulses(self) -> None:
        dp_rank, pp_rank, tp_rank = own_rank()
        pulse = Pulse(dp_rank=dp_rank, pp_rank=pp_rank, tp_rank=tp_rank)
        while True:
            self.send(pulse)
            time.sleep(PULSE_S)


@functools.cache
def zmq_context() -> zmq.Context[Any]:
    """Return the context, for any thread. A socket belongs to the thread that makes it."""
    context: zmq.Context[Any] = zmq.Context(1)
    context.socket(zmq.PAIR).close()
    return context
