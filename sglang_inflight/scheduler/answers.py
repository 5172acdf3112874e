"""Sends one rank's answers to the front end, on the first node.

A scheduler has one ZeroMQ context for our sockets. libzmq starts a context's threads with its first
socket. Without a free file descriptor for them it aborts the process. So the context's threads
start with the scheduler. A later socket without a file descriptor only raises ``zmq.ZMQError``.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

import zmq
from sglang.srt.managers.io_struct import BaseReq, sock_send
from sglang.srt.utils.network import get_zmq_socket

from sglang_inflight.joints import Joint
from sglang_inflight.messages import (
    A,
    Done,
    Failed,
    GenerationContinues,
    InflightCall,
    RankAnswer,
)
from sglang_inflight.topology import is_first_of_replica, own_placement, own_rank
from sglang_inflight.unsupported import Unsupported
from sglang_inflight.vocabulary.errors import ERRORS, Exhausted, InflightError, Refused

logger = logging.getLogger(__name__)


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


# finds the transport of a rank, by the name of the front end's socket; None leaves it to the core.
# May be a collective over all ranks of the replica, on the scheduler's thread
TRANSPORTS: Joint[Callable[[str], ReplyTransport | None]] = Joint("transports")


def find_reply_transport(ipc_name: str) -> ReplyTransport:
    """Return this rank's transport. Only ranks of the front end's node can connect to ``ipc_name``.

    Raise ``Unsupported`` on another node without an extension that reaches the front end.
    """
    for find in TRANSPORTS:
        if (found := find(ipc_name)) is not None:
            return found
    if not own_placement().is_with_front_end:
        raise Unsupported("this server has several nodes, and the extension nodes is off")
    return LocalReplies(ipc_name)


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


@functools.cache
def zmq_context() -> zmq.Context[Any]:
    """Return the context, for any thread. A socket belongs to the thread that makes it."""
    context: zmq.Context[Any] = zmq.Context(1)
    context.socket(zmq.PAIR).close()
    return context
