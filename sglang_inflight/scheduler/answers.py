"""Sends one rank's answers to the front end."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.managers.io_struct import BaseReq

from sglang_inflight.messages import (
    A,
    Done,
    Failed,
    GenerationContinues,
    InflightCall,
    RankAnswer,
)
from sglang_inflight.scheduler.nodes.reply_transport import ReplyTransport
from sglang_inflight.topology import is_first_of_replica, own_rank
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
