"""Isolates the scheduler's loop from SGLang's handlers.

SGLang's loop does not guard its handlers: a failed assertion or a missing key in a handler ends the
scheduler, with every request in it. Here the exception is an error for the handler's caller. A
handler that waits for another process runs off the loop. The preconditions of a handler are checked
before it begins: without these checks it fails half way, with a part of its work done.
"""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    CheckWeightsReqInput,
    GetWeightsByNameReqInput,
    InitWeightsSendGroupForRemoteInstanceReqInput,
    OpenSessionReqInput,
    OpenSessionReqOutput,
    ProfileReq,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    RpcReqInput,
    RpcReqOutput,
    SendWeightsToRemoteInstanceReqInput,
    SlowDownReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglang_inflight.messages import CONTROL_CALL, Call
from sglang_inflight.scheduler.answers import AnswerChannel, sendable
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.by_version import send_control_output
from sglang_inflight.scheduler.other_writers import OtherWriters
from sglang_inflight.scheduler.update.hollow import HollowWeights
from sglang_inflight.sglang_types import get_device
from sglang_inflight.threads import start_thread
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.errors import Conflict, Refused

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BaseReq
    from sglang.utils import TypeBasedDispatcher

    from sglang_inflight.sglang_types import BatchRequest, MemoryRequest, Scheduler

logger = logging.getLogger(__name__)

# fields for the error's text in SGLang's answers
_MESSAGE_FIELDS = ("message", "error_message", "error")
Handler = Callable[[Any], Any]
# Largest part of --watchdog-timeout that /slow_down may add to each step. The watchdog takes a
# step longer than its timeout for a hang.
SHARE_OF_WATCHDOG = 0.5
# These read weights: the RPC may save a model.
_READS_WEIGHTS = (
    CheckWeightsReqInput,
    GetWeightsByNameReqInput,
    RpcReqInput,
    SendWeightsToRemoteInstanceReqInput,
)


class Containment:
    """Wraps every handler of a scheduler.

    Only the scheduler's thread and the threads of ``background`` call it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        boundary: Boundary,
        hollow: HollowWeights,
        answers: AnswerChannel,
        can: Capabilities,
        *,
        stop_reading: Callable[[str], None],
    ) -> None:
        """``stop_reading`` returns when no other thread reads the weights."""
        self._stop_reading = stop_reading
        self._can = can
        self._scheduler = scheduler
        self._boundary = boundary
        self._answers = answers
        self._hollow = hollow
        self._writers = OtherWriters(scheduler, boundary, hollow)
        self.background = BackgroundHandlers(scheduler)

    def surround(self, dispatcher: TypeBasedDispatcher) -> None:
        for request_type, handler in dispatcher._mapping.items():
            # the controller answers for calls of ours
            if issubclass(request_type, Call):
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
                check(request, self._scheduler, self._boundary, self._hollow, self._stop_reading)
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


class BackgroundHandlers:
    """Runs each handler on its own thread: a rendezvous without a peer waits half an hour.

    Answers wait in ``_done`` for the scheduler's thread, because it owns the socket. A deque is
    safe to share between two threads.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._done: collections.deque[tuple[Any, Any]] = collections.deque()

    def send(self, handler: Handler, fail: Callable[[Any, Exception], Any]) -> Handler:
        """Return a handler that starts ``handler``, and answers later.

        ``handler`` must not raise. ``fail`` makes the answer when no thread can start.
        """

        def begin(request: Any) -> Any:
            try:
                start_thread(self._run, handler, request, name="inflight-background")
            except Refused as error:
                return fail(request, error)
            return None

        return begin

    def send_finished_answers(self) -> None:
        """Send the answers of finished handlers. Called at every step boundary."""
        while self._done:
            request, output = self._done.popleft()
            if output is not None:
                send_control_output(self._scheduler, output, request)

    def _run(self, handler: Handler, request: Any) -> None:
        device = next(self._scheduler.tp_worker.model_runner.model.parameters()).device
        if device.type != "cpu":
            torch.get_device_module(device).set_device(device)
        self._done.append((request, handler(request)))


def check(
    request: Any,
    scheduler: Scheduler,
    boundary: Boundary,
    hollow: HollowWeights,
    stop_reading: Callable[[str], None],
) -> None:
    """Raise ``Refused``, or a subclass, before the handler of ``request`` changes anything."""
    if isinstance(request, _READS_WEIGHTS):
        hollow.require_weights(type(request).__name__)
    elif isinstance(request, ReleaseMemoryOccupationReqInput):
        if twice := set(_tags(request)) & scheduler.weight_updater.offload_tags:
            raise Conflict(f"memory is released already: {', '.join(sorted(twice))}")
        _require_idle(scheduler, boundary)
        if GPU_MEMORY_TYPE_WEIGHTS in _tags(request):
            stop_reading("the weights' memory is released")
    elif isinstance(request, ResumeMemoryOccupationReqInput):
        if held := set(_tags(request)) - scheduler.weight_updater.offload_tags:
            raise Conflict(f"memory was not released: {', '.join(sorted(held))}")
    elif isinstance(request, SlowDownReqInput):
        slower: SlowDownReqInput = request
        _may_sleep(slower.forward_sleep_time)
    elif isinstance(request, TokenizedGenerateReqInput):
        _may_process(request)
    elif isinstance(request, BatchTokenizedGenerateReqInput):
        batched: BatchRequest = request
        for each in batched.batch:
            _may_process(each)


def _require_idle(scheduler: Scheduler, boundary: Boundary) -> None:
    if not boundary.is_fully_idle(ignore_waiting=scheduler._engine_paused):
        running, waiting = len(boundary.requests.running()), len(boundary.requests.waiting())
        raise Conflict(
            f"memory cannot be released: {running} requests run and {waiting} wait. Let "
            'them end, or pause with mode "retract" or "abort"'
        )


def _tags(request: MemoryRequest) -> list[str]:
    """Return the kinds of memory named by ``request``. Without tags SGLang means all kinds."""
    known = list(GPU_MEMORY_ALL_TYPES)
    tags = list(request.tags or known)
    if unknown := set(tags) - set(known):
        raise Refused(
            f"unknown memory tags: {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )
    if len(set(tags)) < len(tags):
        raise Refused(f"a memory tag is named twice: {', '.join(tags)}")
    return tags


def _may_sleep(seconds: float | None) -> None:
    most = get_device().watchdog_timeout * SHARE_OF_WATCHDOG
    if seconds is not None and not seconds <= most:
        raise Refused(
            f"forward_sleep_time={seconds:g}: a step sleeps {most:g} s at most, or the watchdog "
            "ends the server (--watchdog-timeout)"
        )


def _may_process(request: Any) -> None:
    """Unpickle the request's logit processor here, and not in a step. SGLang caches it."""
    if not request.custom_logit_processor:
        return
    try:
        CustomLogitProcessor.from_str(request.custom_logit_processor)
    except Exception as error:
        raise Refused(f"custom_logit_processor cannot be made: {error}") from error
