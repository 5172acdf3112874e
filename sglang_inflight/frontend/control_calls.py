"""SGLang's own control calls, each matched to its answers by an id.

SGLang takes the next answer of the right type for the answer. After a caller gave up, its late
answer goes to the next caller, whose call then seems done. In SGLang a raising handler sends no
answer, and only the first rank of a replica answers. Here every rank answers, also with a
failure. A rank on a silent node is not waited for.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_inflight.frontend.aio import Lifetime
from sglang_inflight.frontend.ranks import (
    Ranks,
    rank_of,
    silence_error,
    unknown_outcome,
)
from sglang_inflight.hooking import COMMUNICATOR, REPLACE, hook, with_us
from sglang_inflight.messages import CONTROL_CALL, Failed, RankAnswer
from sglang_inflight.topology import Rank
from sglang_inflight.vocabulary.errors import ERRORS, HandlerFailed

if TYPE_CHECKING:
    from sglang.srt.managers.communicator import FanOutCommunicator
    from sglang.srt.managers.io_struct import BaseReq

    from sglang_inflight.sglang_types import TokenizerManager

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Awaited:
    # ranks that answer in SGLang's form, and ranks that only report completion
    replicas: int
    others: int
    answers: list[Any] = field(default_factory=list)
    done: set[Rank] = field(default_factory=set)
    complete: asyncio.Future[list[Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def end_if_whole(self) -> None:
        is_whole = len(self.answers) == self.replicas and len(self.done) == self.others
        if is_whole and not self.complete.done():
            self.complete.set_result(self.answers)

    def give_up(self, silent: frozenset[Rank], for_s: float) -> None:
        """Fail the wait if a ``silent`` rank is not done; SGLang's answers name no rank."""
        lost = silent - self.done
        if lost and not self.complete.done():
            self.complete.set_exception(unknown_outcome(silence_error(lost, for_s)))


async def _as_they_are(_: BaseReq, answers: list[Any]) -> list[Any]:
    return answers


class ControlCalls:
    """Control calls of one ``TokenizerManager``. Lives on the front end's event loop."""

    def __init__(self, ranks: Ranks, lifetime: Lifetime) -> None:
        self._ranks = ranks
        self._lifetime = lifetime
        # calls by their ids
        self._awaited: dict[str, _Awaited] = {}
        # called with a request and its answers; what it returns is the caller's answers
        self.after: Callable[[BaseReq, list[Any]], Awaitable[list[Any]]] = _as_they_are

    def route(self, tokenizer_manager: TokenizerManager) -> None:
        """Route every communicator of the manager through this object."""
        from sglang.srt.managers.communicator import FanOutCommunicator as Communicator

        for value in vars(tokenizer_manager).values():
            if isinstance(value, Communicator):
                vars(value)["inflight"] = self

    @staticmethod
    @hook(f"{COMMUNICATOR}.queueing_call", REPLACE, when=with_us)
    async def call(communicator: Any, obj: BaseReq) -> list[Any]:
        """Send ``obj`` and return every replica's answer.

        Raises a failed rank's error, ``HandlerFailed`` if the error has no type of ours, and
        ``OutcomeUnknown`` if a rank is silent.
        """
        self: ControlCalls = communicator.inflight
        answers = await self._lifetime.unless_shut_down(self._call(communicator, obj))
        return await self.after(obj, answers)

    async def _call(self, communicator: FanOutCommunicator[Any], request: BaseReq) -> list[Any]:
        async with communicator._queueing_lock:
            request.rid = CONTROL_CALL + uuid.uuid4().hex
            replicas = communicator._fan_out
            awaited = _Awaited(replicas, self._ranks.count - replicas)
            self._awaited[request.rid] = awaited
            try:
                communicator._send(request)
                with self._ranks.given_up_on_silence(awaited):
                    return await awaited.complete
            finally:
                del self._awaited[request.rid]

    @hook(f"{COMMUNICATOR}.handle_recv", REPLACE, via="inflight", when=with_us)
    def take_answer(self, recv_obj: BaseReq) -> None:
        """Take in an answer in SGLang's form."""
        awaited = self._awaited.get(recv_obj.rid or "")
        if awaited is None:
            logger.info("Dropped a late %s: its caller has left.", type(recv_obj).__name__)
            return
        awaited.answers.append(recv_obj)
        awaited.end_if_whole()

    def take_rank_answer(self, answer: RankAnswer) -> None:
        """Take in a rank's completion, or its failure. One failure fails the call."""
        awaited = self._awaited.get(answer.call_id)
        if awaited is None:
            return
        if not isinstance(answer, Failed):
            awaited.done.add(rank_of(answer))
            awaited.end_if_whole()
        elif not awaited.complete.done():
            error = ERRORS.get(answer.error, HandlerFailed)
            awaited.complete.set_exception(error(answer.message))
