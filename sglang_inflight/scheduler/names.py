"""Names of requests, where several tokenizer workers take requests that clients have named.

A name belongs to one request at a time. With one tokenizer worker the front end sees to it; with
several, none of them knows the names of the others. SGLang then runs two requests of one name, and
takes the one for the other where it looks a request up by its ``rid``: in a pipeline's steps, in
storage below a hierarchical cache, and in the detokenizer, which ends.

The rank that takes messages from the workers' socket decides, before other ranks hear of them:
ranks of a pipeline have processed different results at that time, and would decide differently.
Replicas decide each on its own. Requests of one name in two replicas meet in the detokenizer alone,
which tells workers apart (``frontend/workers/hooks.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
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

from sglang_inflight.sglang_types.runtime_context import get_serving

if TYPE_CHECKING:
    from sglang_inflight.scheduler.boundary import Boundary
    from sglang_inflight.scheduler.sglang_types.scheduler import Scheduler
    from sglang_inflight.sglang_types.requests import BatchRequest, Request

logger = logging.getLogger(__name__)

# names; then those of requests that have ended are dropped
FULL = 1 << 16


class Names:
    """Names that have come. Only the scheduler's thread touches them.

    They belong to the process, which has one scheduler: SGLang's object that receives messages
    knows of none. A name may outlive its request here. Whether it is in use the requests
    themselves say, when it comes again.
    """

    def __init__(self) -> None:
        self._scheduler: Scheduler | None = None
        self._boundary: Boundary | None = None
        self._names: set[str] = set()
        self._full = FULL
        # accepted, and not in the scheduler's hands yet
        self._taken: set[str] = set()

    def adopt(self, scheduler: Scheduler, boundary: Boundary) -> None:
        self._scheduler, self._boundary = scheduler, boundary

    def take(self, messages: list[Any] | None) -> list[Any] | None:
        """The ``messages`` that may pass, in their order. The others are answered here.

        ``None`` and what a pipeline's next stage gets pass as they are.
        """
        scheduler = self._scheduler
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
            batched: BatchRequest = message
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
        assert self._boundary is not None
        live = {req.rid for req in self._boundary.live_requests() if not req.finished()}
        return live | self._taken

    def _refuse(self, request: Any) -> None:
        assert self._scheduler is not None
        message = (
            f"Duplicate request ID detected: {request.rid}. Another tokenizer worker has a request "
            "of that name; use the name again when it has ended"
        )
        logger.warning("%s", message)
        reason: Any = {
            "type": "abort",
            "status_code": HTTPStatus.BAD_REQUEST,
            "message": message,
        }
        abort = AbortReq(rid=request.rid, abort_message=message, finished_reason=reason)
        self._scheduler.ipc_channels.send_to_tokenizer.send_output(abort, request)
        # images in shared memory, which nobody would take
        request.unwrap_pickle_fields()
        discard_shm_features(request)


def _rids(message: Any) -> Iterator[str]:
    requests: list[Request] = getattr(message, "batch", None) or [message]
    for each in requests:
        if isinstance(each, TokenizedGenerateReqInput | TokenizedEmbeddingReqInput):
            yield each.rid


NAMES = Names()
