"""Refuses a request whose ``rid`` is in use, with several tokenizer workers.

A ``rid`` names one request at a time. One tokenizer worker's front end ensures this. With several
workers, none knows the others' names. SGLang would run two requests of one ``rid``, and confuse
them in each lookup by ``rid``: in a pipeline's steps, and in storage below a hierarchical cache.
The detokenizer would raise, and end.

The rank with the workers' socket decides, before other ranks receive the messages: at that time
the ranks of a pipeline have processed different results, and would decide differently. Each replica
decides for itself. Requests of one ``rid`` in two replicas meet only in the detokenizer, and there
the extension ``workers`` tells the workers apart.

This module hooks ``SchedulerRequestReceiver._pull_raw_reqs`` and ``Scheduler.abort_request``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.mm_utils import discard_shm_features

from sglang_inflight.hooking import AROUND, SCHEDULER, hook
from sglang_inflight.scheduler.controller import PARTS, Controller
from sglang_inflight.sglang_types import get_serving

if TYPE_CHECKING:
    from sglang_inflight.scheduler.requests import Requests
    from sglang_inflight.sglang_types import Scheduler

logger = logging.getLogger(__name__)

# number of names kept before the names of ended requests are dropped
FULL = 1 << 16


class RequestNames:
    """The names received. Only the scheduler's thread touches them.

    There is one object per process, because SGLang's receiver has no reference to the process's
    one scheduler. A name may outlive its request here: when it comes again, the scheduler's
    requests show whether it is in use.
    """

    def __init__(self) -> None:
        self._scheduler: Scheduler | None = None
        self._requests: Requests | None = None
        self._names: set[str] = set()
        self._full = FULL
        # accepted names whose requests have not reached the scheduler yet
        self._taken: set[str] = set()

    def bind(self, scheduler: Scheduler, requests: Requests) -> None:
        self._scheduler, self._requests = scheduler, requests

    @hook(
        "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
        "._pull_raw_reqs",
        AROUND,
        via=lambda _: NAMES,
    )
    def take(self, pull: Callable[[], list[Any] | None]) -> list[Any] | None:
        """Return the accepted of the pulled messages. Refused requests are answered here.

        ``None`` passes as it is, and so do all messages on ranks without the socket.
        """
        scheduler, messages = self._scheduler, pull()
        if not messages or scheduler is None or get_serving().tokenizer_worker_num == 1:
            return messages
        if scheduler.ipc_channels.send_to_tokenizer.socket is None:
            return messages
        self._taken = {rid for each in scheduler._deferred_input_requests for rid in _rids(each)}
        return [each for each in messages if self._may_pass(each)]

    def _may_pass(self, message: Any) -> bool:
        if isinstance(message, TokenizedGenerateReqInput | TokenizedEmbeddingReqInput):
            return self._is_accepted(message)
        if isinstance(message, BatchTokenizedGenerateReqInput | BatchTokenizedEmbeddingReqInput):
            batched: Any = message
            batched.batch = [each for each in batched.batch if self._is_accepted(each)]
            return bool(batched.batch)
        return True

    def _is_accepted(self, request: Any) -> bool:
        rid: str = request.rid
        if rid in self._names and rid in self._in_use():
            self._refuse(request)
            return False
        if len(self._names) >= self._full:
            self._names &= self._in_use()
            self._full = max(FULL, 2 * len(self._names))
        self._names.add(rid)
        self._taken.add(rid)
        return True

    def _in_use(self) -> set[str]:
        assert self._requests is not None
        live = {req.rid for req in self._requests.live() if not req.finished()}
        return live | self._taken

    @hook(f"{SCHEDULER}.abort_request", AROUND, order=1, via=lambda _: NAMES)
    def abort_own(self, abort: Callable[[AbortReq], None], recv_req: AbortReq) -> None:
        """Abort no request of another tokenizer worker than the abort's.

        A worker aborts its own request. That request may have ended, or been refused, by now, and
        another worker's request may have its name.
        """
        if not self._is_of_another_worker(recv_req):
            abort(recv_req)

    def _is_of_another_worker(self, request: AbortReq) -> bool:
        worker = request.http_worker_ipc
        if request.abort_all or worker is None:
            return False
        assert self._requests is not None
        live = self._requests.live()
        named = [req for req in live if req.rid == request.rid and not req.finished()]
        return bool(named) and all(req.http_worker_ipc not in (None, worker) for req in named)

    def _refuse(self, request: Any) -> None:
        assert self._scheduler is not None
        message = (
            f"Duplicate request ID detected: {request.rid}. Another tokenizer worker has a request "
            "with this rid: use another rid, or wait until that request has ended"
        )
        logger.warning("%s", message)
        reason: Any = {
            "type": "abort",
            "status_code": HTTPStatus.BAD_REQUEST,
            "message": message,
        }
        abort = AbortReq(rid=request.rid, abort_message=message, finished_reason=reason)
        self._scheduler.ipc_channels.send_to_tokenizer.send_output(abort, request)
        # free the request's images in shared memory: no other process will
        request.unwrap_pickle_fields()
        discard_shm_features(request)


def _rids(message: Any) -> Iterator[str]:
    for each in getattr(message, "batch", None) or [message]:
        if isinstance(each, TokenizedGenerateReqInput | TokenizedEmbeddingReqInput):
            assert each.rid is not None
            yield each.rid


NAMES: RequestNames = RequestNames()


@PARTS.join()
def bind_names(controller: Controller) -> RequestNames:
    NAMES.bind(controller.scheduler, controller.boundary.requests)
    return NAMES
