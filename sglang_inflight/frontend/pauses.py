"""One pause across all ranks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from sglang_inflight.errors import Conflict, RankSilent, Refused
from sglang_inflight.frontend.bodies import ContinueBody, PauseBody
from sglang_inflight.frontend.deadline import Deadline
from sglang_inflight.frontend.metrics import Metrics
from sglang_inflight.frontend.ranks import Rank, Ranks, rank_of
from sglang_inflight.frontend.sglangs_pause import SGLangsPause
from sglang_inflight.frontend.shared_call import SharedCall
from sglang_inflight.grants import Grant, RankGrant, Release
from sglang_inflight.messages import (
    ContinueCall,
    Described,
    Moved,
    PauseCall,
    Paused,
    RankAnswer,
    Resumed,
    StatusCall,
)
from sglang_inflight.sglang_types.runtime_context import get_disagg
from sglang_inflight.status import MEMORY
from sglang_inflight.unsupported import why_no_pause, why_not_sent_for_again

if TYPE_CHECKING:
    from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager

# A step may take long (a prefill of many thousand tokens), and a pause waits for it.
GRANT_TIMEOUT_S = 120.0
RELEASE_TIMEOUT_S = 1.0
ASK_AGAIN_S = 1.0

logger = logging.getLogger(__name__)


class Pauses:
    """Takes, renews and lets go of pauses. The state itself is the schedulers'.

    ``TokenizerManager.is_pause`` follows along for upstream's readers of it (``/ready``,
    gRPC). It gates nothing: patch 0003 lets requests through to the schedulers' queues. It is
    true from the moment that a pause is asked for; after that it is what the ranks have said
    last, whoever waits for their answers. One of several workers is told by the owner instead.
    Where the loop has no pause states there is SGLang's own pause, of which it is the state.
    """

    def __init__(self, tokenizer_manager: TokenizerManager, ranks: Ranks, metrics: Metrics) -> None:
        self._tokenizer_manager = tokenizer_manager
        self.sglangs = SGLangsPause(tokenizer_manager)
        self._metrics = metrics
        self._ranks = ranks
        # calls that take a pause of a name that their callers chose
        self._taking: dict[str, SharedCall[Grant]] = {}
        # calls of those, which ranks may answer now
        self._taken: list[PauseCall] = []
        # as each rank has said last
        self._paused: dict[Rank, bool] = {}
        self._asking = asyncio.Lock()
        self._asked_at = -math.inf
        self._seen_mode: str | None = None

    async def pause(self, body: PauseBody) -> Grant:
        """Pause generation; returns when every rank stands still.

        ``pause_id`` renews the pause of that name, and ``mode`` may change it; a new pause
        is an ``abort`` where no mode is given, as upstream has it. It gets the name
        ``new_id``, where the caller chose one: making the call again, because its answer was
        lost, then takes no second pause. After ``lease_s`` seconds without a renewal
        generation continues by itself. ``timeout_s`` bounds the mode ``wait``; requests that
        still run then stay frozen, as by ``in_place``. A caller that leaves before the
        answer holds nothing.

        Raises ``Conflict`` where ``pause_id`` is not held any more, ``Refused`` where the
        server's loop has no pause states.
        """
        if (reason := why_no_pause()) is not None:
            raise Refused(f'{reason}. SGLang\'s own, of mode "abort" and without a name, is there')
        if body.mode == "retract" and get_disagg().disaggregation_mode == "decode":
            is_multimodal = self._tokenizer_manager.model_config.is_multimodal
            if (reason := why_not_sent_for_again(is_multimodal=is_multimodal)) is not None:
                raise Refused(f"running requests cannot be retracted: {reason}")
        if self._tokenizer_manager.gracefully_exit:
            raise Conflict("the server is told to go: it ends its requests, and pauses no more")
        if body.pause_id is not None and body.new_id is not None:
            raise Refused("pause_id renews a pause and new_id names a new one: pass one of them")
        if MEMORY in (body.pause_id, body.new_id):
            raise Refused(f"a pause cannot be called {MEMORY!r}: that of released memory is")
        mode, new_id = body.mode or None, body.new_id
        call = PauseCall(
            mode=mode if body.pause_id is not None else mode or "abort",
            pause_id=body.pause_id or new_id or uuid.uuid4().hex,
            renews=body.pause_id is not None,
            may_be_held=new_id is not None,
            lease_s=body.lease_s,
            timeout_s=body.timeout_s,
        )
        patience = GRANT_TIMEOUT_S
        if mode == "wait":
            patience += body.timeout_s or 86400.0
        # the caller of a call that was made again may be noticed to be gone after that
        taking = self._taking.setdefault(call.pause_id, SharedCall()) if new_id else SharedCall()
        try:
            return await taking.join(lambda: self._take(call, patience), lambda: self._undo(call))
        finally:
            if new_id is not None and taking.is_over:
                self._taking.pop(new_id, None)

    async def _take(self, call: PauseCall, patience_s: float) -> Grant:
        self._tokenizer_manager.is_pause = True
        self._taken.append(call)
        began = time.perf_counter()
        try:
            answers = await self._ranks.call(call, patience_s)
        except Exception:
            await asyncio.shield(self._undo(call))
            raise
        finally:
            self._taken.remove(call)
        granted_mode = answers[0].mode
        self._metrics.pause_grant.labels(granted_mode).observe(time.perf_counter() - began)
        return Grant(
            mode=granted_mode,
            pause_id=call.pause_id,
            weight_version=self._tokenizer_manager.config_value("weight_version"),
            ranks=tuple(_count(answer) for answer in answers),
        )

    async def resume(self, body: ContinueBody) -> Release:
        """Let go of one pause, or of all; generation goes on when none is left.

        Raises ``Conflict`` where ``pause_id`` is not held any more, ``OutcomeUnknown`` where
        a rank is silent.
        """
        if self.sglangs.is_the_servers:
            return await self.sglangs.let_go(body)
        call = ContinueCall(pause_id=body.pause_id, torch_empty_cache=body.torch_empty_cache)
        answers = await self._ranks.carry_out(call, GRANT_TIMEOUT_S)
        paused = any(answer.paused for answer in answers)
        return Release(
            message="Generation continued successfully."
            if not paused
            else "Generation stays paused: there are other holders.",
            paused=paused,
        )

    @contextlib.asynccontextmanager
    async def held_while_nothing_runs(
        self, pause_id: str, deadline: Deadline
    ) -> AsyncIterator[None]:
        """A ``wait`` that yields to every other pause, for the time of the block.

        Where generation stands still already it holds nothing, and waits for nothing: the
        requests it would wait for never finish then (sglang#25319). Raises ``Conflict``
        where requests still run when ``deadline`` is over.
        """
        call = PauseCall(mode="wait", pause_id=pause_id, yields=True)
        try:
            await self._wait_until_nothing_runs(call, deadline)
            yield
        finally:
            await asyncio.shield(self._undo(call))

    async def _wait_until_nothing_runs(self, call: PauseCall, deadline: Deadline) -> None:
        while True:
            try:
                await self._ranks.call(call, deadline.seconds_left)
                return
            except RankSilent as silence:
                raise Conflict(
                    f"requests still ran when the update's time was over ({silence})"
                ) from silence
            except Conflict:
                # somebody paused, or continued: the next try finds generation standing still,
                # or waits anew
                if deadline.is_over:
                    raise

    @contextlib.asynccontextmanager
    async def let_go_on_failure(self, pause_id: str) -> AsyncIterator[None]:
        """Whatever ends the block early, a caller who leaves too, lets go of the pause."""
        try:
            yield
        except BaseException:
            await asyncio.shield(self.give_back(pause_id))
            raise

    async def _undo(self, call: PauseCall) -> None:
        """A caller who was not granted a pause holds none, on no rank."""
        await self.give_back(None if call.renews else call.pause_id)

    async def give_back(self, pause_id: str | None) -> None:
        """Let go of a pause that nobody wants, on every rank, and ask what is so then."""
        if pause_id is not None:
            await self._release_everywhere(pause_id)
        try:
            await self.ask_status()
        except Refused as error:
            logger.warning("Whether generation is paused is not known: %s", error)

    async def _release_everywhere(self, pause_id: str) -> None:
        call = ContinueCall(pause_id=pause_id, torch_empty_cache=False)
        # a silent rank takes the message in when it comes to its next boundary
        with contextlib.suppress(RankSilent):
            await self._ranks.ask(call, RELEASE_TIMEOUT_S)

    async def is_paused(self) -> bool:
        if self.sglangs.is_the_servers:
            return self.sglangs.holds
        paused = {rank.pause.paused for rank in await self.ask_status()}
        if len(paused) > 1:
            raise Conflict("the replicas differ: some are paused, some are not")
        return paused.pop()

    async def mode(self) -> str | None:
        """The mode of the pause that holds now, and None where none does.

        Asked for by every stream that is silent, so the ranks are asked once a second.
        """
        if not self._tokenizer_manager.is_pause:
            return None
        if self.sglangs.holds:
            return "abort"
        async with self._asking:
            if time.monotonic() >= self._asked_at + ASK_AGAIN_S:
                try:
                    pauses = [rank.pause for rank in await self.ask_status()]
                except Refused as error:
                    logger.warning("Whether generation is paused is not known: %s", error)
                    return None
                self._seen_mode = next((pause.mode for pause in pauses if pause.paused), None)
                self._asked_at = time.monotonic()
        return self._seen_mode

    async def ask_status(self) -> list[Described]:
        """Each rank's own account of itself."""
        return await self._ranks.call(StatusCall(), GRANT_TIMEOUT_S)

    def hear(self, answer: RankAnswer) -> None:
        """Also that of a call which was given up.

        An update that waits for requests takes a pause too, and is none to upstream's readers.
        """
        match answer:
            case Resumed(paused=paused) | Moved(paused=paused):
                pass
            case Described(pause=pause):
                paused = pause.paused
            case Paused() if any(call.call_id == answer.call_id for call in self._taken):
                paused = True
            case _:
                return
        self._paused[rank_of(answer)] = paused
        if not self.sglangs.is_the_servers:
            self._tokenizer_manager.is_pause = any(self._paused.values())


def _count(answer: Paused) -> RankGrant:
    return RankGrant(
        dp_rank=answer.dp_rank,
        tp_rank=answer.tp_rank,
        pp_rank=answer.pp_rank,
        running=answer.running,
        waiting=answer.waiting,
        retracted=answer.retracted,
        aborted=answer.aborted,
    )
