"""SGLang's own control calls, each matched to its answers by an id.

Upstream takes the next answer of the right type for the answer. A caller that gave up,
whose answer is still to come, leaves it to the next caller, who then thinks that its own
call is done. And a handler that raises has no answer at all.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_inflight import errors
from sglang_inflight.errors import HandlerFailed, Refused
from sglang_inflight.messages import RankAnswer

if TYPE_CHECKING:
    from sglang.srt.managers.communicator import FanOutCommunicator

logger = logging.getLogger(__name__)


@dataclass
class _Awaited:
    replicas: int
    answers: list[Any] = field(default_factory=list)
    complete: asyncio.Future[list[Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


# by the id of the call; event loops of one process share nothing but this
_awaited: dict[str, _Awaited] = {}


async def call(communicator: FanOutCommunicator[Any], request: Any) -> list[Any]:
    """Send ``request`` and return the answer of every replica.

    Raises ``HandlerFailed``, or another child of ``Refused``, where a rank said so.
    """
    async with communicator._queueing_lock:
        request.rid = uuid.uuid4().hex
        awaited = _awaited[request.rid] = _Awaited(communicator._fan_out)
        try:
            communicator._send(request)
            return await awaited.complete
        finally:
            del _awaited[request.rid]


def hear(communicator: FanOutCommunicator[Any], answer: Any) -> None:
    """An answer of upstream's type came in."""
    awaited = _awaited.get(answer.rid)
    if awaited is None:
        logger.info("Nobody waits for this %s any more.", type(answer).__name__)
        return
    awaited.answers.append(answer)
    if len(awaited.answers) == awaited.replicas and not awaited.complete.done():
        awaited.complete.set_result(awaited.answers)


def fail(answer: RankAnswer) -> None:
    """A rank's handler raised: the call has failed, whatever other ranks say."""
    awaited = _awaited.get(answer.call_id)
    if awaited is not None and not awaited.complete.done():
        error: type[Refused] = getattr(errors, answer.error, HandlerFailed)
        awaited.complete.set_exception(error(answer.message))
