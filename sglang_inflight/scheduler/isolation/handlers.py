"""Turns an exception in one of SGLang's handlers into an error for its caller.

SGLang's loop does not guard its handlers: a failed assertion or a missing key in a handler ends
the scheduler, with every request in it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    InitWeightsSendGroupForRemoteInstanceReqInput,
    OpenSessionReqInput,
    OpenSessionReqOutput,
    ProfileReq,
    RpcReqInput,
    RpcReqOutput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)

from sglang_inflight.messages import CALLS, CONTROL_CALL
from sglang_inflight.scheduler.answers import AnswerChannel, sendable
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.isolation import preconditions
from sglang_inflight.scheduler.isolation.background import BackgroundHandlers
from sglang_inflight.scheduler.isolation.other_writers import OtherWriters
from sglang_inflight.scheduler.memory.release import MemoryRelease
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.errors import Refused

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BaseReq
    from sglang.utils import TypeBasedDispatcher

    from sglang_inflight.sglang_types import Scheduler

logger = logging.getLogger(__name__)

# fields for the error's text in SGLang's answers
_MESSAGE_FIELDS = ("message", "error_message", "error")


class Containment:
    """Wraps every handler of a scheduler.

    Only the scheduler's thread and the threads of ``background`` call it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        boundary: Boundary,
        memory_release: MemoryRelease,
        answers: AnswerChannel,
        can: Capabilities,
    ) -> None:
        self._can = can
        self._scheduler = scheduler
        self._boundary = boundary
        self._answers = answers
        self._memory_release = memory_release
        self._writers = OtherWriters(scheduler, boundary, memory_release)
        self.background = BackgroundHandlers(scheduler)

    def surround(self, dispatcher: TypeBasedDispatcher) -> None:
        for request_type, handler in dispatcher._mapping.items():
            # the controller answers for calls of ours
            if request_type in CALLS:
                continue
            contained = self._contain(handler)
            waits = request_type is InitWeightsSendGroupForRemoteInstanceReqInput
            # loops without pause states never send background answers
            if waits and self._can.pause is None:
                contained = self.background.send(contained, self._answer)
            dispatcher._mapping[request_type] = contained
        # the cache still holds the bare handlers
        dispatcher._mro_cache.clear()

    def _contain(self, handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(handler)
        def contained(request: Any) -> Any:
            try:
                preconditions.check(request, self._scheduler, self._boundary, self._memory_release)
                with self._writers.around(request):
                    output = handler(request)
            except Exception as error:
                if not isinstance(error, Refused):
                    logger.exception("The handler of %s failed", type(request).__name__)
                return self._answer(request, error)
            if self._is_mute and _is_control_call(request):
                self._answers.succeed_request(request)
            return output

        return contained

    @property
    def _is_mute(self) -> bool:
        """Whether this rank has no socket for outputs, as any but its replica's first."""
        return self._scheduler.ipc_channels.send_to_tokenizer.socket is None

    def _answer(self, request: Any, error: Exception) -> Any:
        """Answer ``error``. Return the output for the loop to send, or None if it is sent here."""
        message = f"{type(request).__name__} failed: {str(error) or type(error).__name__}"
        if isinstance(error, Refused):
            message = str(error)
        message = sendable(message)
        if isinstance(request, TokenizedGenerateReqInput | TokenizedEmbeddingReqInput):
            self._end([request], message, _status_of(error))
        elif isinstance(request, BatchTokenizedGenerateReqInput | BatchTokenizedEmbeddingReqInput):
            self._end(request.batch, message, _status_of(error))
        elif self._is_mute:
            self._answers.fail_request(request, error, message)
        elif isinstance(request, RpcReqInput):
            return RpcReqOutput(success=False, message=message)
        elif isinstance(request, OpenSessionReqInput):
            return OpenSessionReqOutput(session_id=request.session_id, success=False)
        elif isinstance(error, Refused) or (output := _failure(request, message)) is None:
            self._answers.fail_request(request, error, message)
        else:
            return output
        return None

    def _end(self, requests: Sequence[BaseReq], message: str, status: HTTPStatus) -> None:
        """Abort the ``requests`` that did not reach the scheduler."""
        reason: Any = {"type": "abort", "status_code": status, "message": message}
        live = {req.rid for req in self._boundary.requests.live()}
        for request in requests:
            if request.rid not in live:
                abort = AbortReq(rid=request.rid, abort_message=message, finished_reason=reason)
                self._scheduler.ipc_channels.send_to_tokenizer.send_output(abort, request)


def _status_of(error: Exception) -> HTTPStatus:
    is_refused = isinstance(error, Refused)
    return HTTPStatus.BAD_REQUEST if is_refused else HTTPStatus.INTERNAL_SERVER_ERROR


def _is_control_call(request: Any) -> bool:
    rid = getattr(request, "rid", None)
    return isinstance(rid, str) and rid.startswith(CONTROL_CALL)


def _failure(request: Any, message: str) -> Any:
    """Return SGLang's own failure answer to ``request``, or None if it has none."""
    # its caller would answer HTTP 500 without the message
    if isinstance(request, ProfileReq):
        return None
    # our message types may subclass SGLang's
    names = [kind.__name__.removesuffix("Input") + "Output" for kind in type(request).__mro__]
    shape = next((found for name in names if (found := getattr(io_struct, name, None))), None)
    if shape is None:
        return None
    fields = {field.name: field for field in msgspec.structs.fields(shape)}
    says = next((name for name in _MESSAGE_FIELDS if name in fields), None)
    if "success" not in fields or says is None:
        return None
    given = {"success": False, says: message}
    if any(field.required and name not in given for name, field in fields.items()):
        return None
    return shape(**given)
