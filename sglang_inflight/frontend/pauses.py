"""Take, renew and release pauses across all ranks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from sglang_inflight.frontend.aio import Deadline, SharedCall
from sglang_inflight.frontend.ranks import Ranks, rank_of
from sglang_inflight.frontend.sglangs_pause import SGLangsPause
from sglang_inflight.messages import (
    Changed,
    ContinueCall,
    Described,
    PauseCall,
    Paused,
    RankAnswer,
    Resumed,
    StatusCall,
)
from sglang_inflight.metrics import FrontEndMetrics
from sglang_inflight.sglang_types import get_disagg
from sglang_inflight.topology import Rank
from sglang_inflight.vocabulary.answers import MEMORY, Capabilities, Grant, RankGrant, Release
from sglang_inflight.vocabulary.bodies import ContinueBody, PauseBody
from sglang_inflight.vocabulary.errors import Conflict, RankSilent, Refused

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

# A step may take long (a prefill of many thousand tokens), and a pause waits for it.
GRANT_TIMEOUT_S = 120.0
RELEASE_TIMEOUT_S = 1.0
ASK_AGAIN_S = 1.0

logger = logging.getLogger(__name__)


class Pauses:
    """Take, renew and release pauses. The schedulers hold the state.

    ``TokenizerManager.is_pause`` mirrors the state for its readers in SGLang (``/ready``,
    gRPC). The flag gates nothing: patch 0003 lets requests through to the schedulers' queues.
    ``pause`` sets the flag; each later answer of a rank updates it, also if the call's caller has
    left. With several tokenizer workers the owner sends the state to each worker.
    If the loop has no pause states, the flag itself is the state of SGLang's own pause.
    """

    def __init__(
        self,
        tokenizer_manager: TokenizerManager,
        ranks: Ranks,
        metrics: FrontEndMetrics,
        can: Capabilities,
        *,
        lease_s: float | None,
    ) -> None:
        """``lease_s``: the lease of a pause whose caller names none; None is no lease."""
        self._tokenizer_manager = tokenizer_manager
        self._can = can
        self._lease_s = lease_s
        self.sglangs = SGLangsPause(tokenizer_manager, can)
        self._metrics = metrics
        self._ranks = ranks
        # running calls by their callers' new_id
        self._taking: dict[str, SharedCall[Grant]] = {}
        # set in a tokenizer worker, by the owner's state
        self.owner_rejects = False
        # called after ``rejects`` may have changed
        self.on_change: Callable[[], None] = lambda: None
        # calls sent and not yet answered by every rank
        self._taken: list[PauseCall] = []
        # states in each rank's last answer
        self._paused: dict[Rank, bool] = {}
        self._rejecting: dict[Rank, bool] = {}
        self._asking = asyncio.Lock()
        self._asked_at = -math.inf
        self._seen_mode: str | None = None

    async def pause(self, body: PauseBody) -> Grant:
        """Pause generation; return when every rank is paused.

        ``pause_id`` renews the pause with that id, and ``mode`` may change its mode. A new pause
        without a mode is an ``abort``, as in SGLang. ``new_id`` names a new pause: a repeated
        call, made after a lost answer, then takes no second pause. ``lease_s`` seconds after the
        last renewal generation continues by itself. ``timeout_s`` bounds the mode ``wait``;
        requests still running then are frozen, as by ``in_place``. With ``new_requests``
        "reject", requests that arrive from now on are refused with 503. If the caller leaves
        before the answer, the pause is released.

        Raises ``Conflict`` if ``pause_id`` is not held any more, ``Refused`` if the server's
        loop has no pause states.
        """
        if self._can.pause is not None:
            raise Refused(
                f'{self._can.pause}. Use SGLang\'s own pause: mode "abort" and no other field'
            )
        if body.mode == "retract" and self._can.retract is not None:
            raise Refused(self._can.retract)
        if body.new_requests == "reject" and get_disagg().disaggregation_mode == "prefill":
            raise Refused(
                'new_requests="reject" is not possible on a prefill server: its decode server may '
                "send it running requests, to recompute their KV. Pass it to the decode server"
            )
        if self._tokenizer_manager.gracefully_exit:
            raise Conflict("the server is shutting down (SIGTERM), and takes no new pause")
        if body.pause_id is not None and body.new_id is not None:
            raise Refused("pause_id renews a pause and new_id names a new one: pass one of them")
        if MEMORY in (body.pause_id, body.new_id):
            raise Refused(f"the pause id {MEMORY!r} is reserved for the pause of released memory")
        mode, new_id = body.mode or None, body.new_id
        is_new = body.pause_id is None
        call = PauseCall(
            mode=mode or "abort" if is_new else mode,
            pause_id=body.pause_id or new_id or uuid.uuid4().hex,
            renews=not is_new,
            may_be_held=new_id is not None,
            lease_s=self._lease_s if is_new and body.lease_s is None else body.lease_s,
            timeout_s=body.timeout_s,
            new_requests=body.new_requests,
        )
        patience = GRANT_TIMEOUT_S
        if mode == "wait":
            patience += body.timeout_s or 86400.0
        # A client may repeat the call before the server notices that the first connection ended.
        taking = self._taking.setdefault(call.pause_id, SharedCall()) if new_id else SharedCall()
        try:
            return await taking.join(lambda: self._take(call, patience), lambda: self._undo(call))
        finally:
            if new_id is not None and taking.is_over:
                self._taking.pop(new_id, None)

    async def _take(self, call: PauseCall, patience_s: float) -> Grant:
        self._taken.append(call)
        self._tokenizer_manager.is_pause = True
        self.on_change()
        began = time.perf_counter()
        try:
            answers = await self._ranks.call(call, patience_s)
        except Exception:
            await asyncio.shield(self._undo(call))
            raise
        finally:
            self._taken.remove(call)
            self.on_change()
        granted_mode = answers[0].mode
        self._metrics.pause_grant.labels(granted_mode).observe(time.perf_counter() - began)
        return Grant(
            mode=granted_mode,
            pause_id=call.pause_id,
            weight_version=self._tokenizer_manager.config_value("weight_version"),
            ranks=tuple(_count(answer) for answer in answers),
        )

    @property
    def rejects(self) -> bool:
        """Whether a pause, held or still draining, rejects new requests.

        Requests that are rejected reach no scheduler, so the front end mirrors the ranks' state,
        as for ``is_pause``. A call counts from its sending on: its drain may last long.
        """
        return (
            self.owner_rejects
            or any(self._rejecting.values())
            or any(call.new_requests == "reject" for call in self._taken)
        )

    async def resume(self, body: ContinueBody) -> Release:
        """Release one pause, or all; generation continues when none is left.

        Raises ``Conflict`` if ``pause_id`` is not held any more, ``OutcomeUnknown`` if a rank is
        silent.
        """
        if self.sglangs.is_the_servers:
            return await self.sglangs.release(body)
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
        """Hold a ``wait`` pause during the block; the pause yields to every other pause.

        If generation is already paused, take no pause and do not wait: frozen requests never
        finish (sglang#25319). Raises ``Conflict`` if requests still run at the ``deadline``.
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
                # Another caller paused or continued: the next try finds generation paused, or
                # waits again.
                if deadline.is_over:
                    raise

    @contextlib.asynccontextmanager
    async def release_on_failure(self, pause_id: str) -> AsyncIterator[None]:
        """Release the pause if the block raises or is cancelled, as by a caller's disconnect."""
        try:
            yield
        except BaseException:
            await asyncio.shield(self.give_back(pause_id))
            raise

    async def _undo(self, call: PauseCall) -> None:
        """Release, on every rank, a pause not granted to its caller."""
        await self.give_back(None if call.renews else call.pause_id)

    async def give_back(self, pause_id: str | None) -> None:
        """Release an unwanted pause on every rank, then refresh the cached state."""
        if pause_id is not None:
            await self._release_everywhere(pause_id)
        try:
            await self.ask_status()
        except Refused as error:
            logger.warning("The pause state is unknown after a release: %s", error)

    async def _release_everywhere(self, pause_id: str) -> None:
        call = ContinueCall(pause_id=pause_id, torch_empty_cache=False)
        # a silent rank handles the message at its next step boundary
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
        """Return the current pause's mode, or None if generation runs.

        Every silent stream calls this, so ranks are asked at most once a second.
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
                    logger.warning("The pause state is unknown: %s", error)
                    return None
                self._seen_mode = next((pause.mode for pause in pauses if pause.paused), None)
                self._asked_at = time.monotonic()
        return self._seen_mode

    async def ask_status(self) -> list[Described]:
        """Return every rank's status."""
        return await self._ranks.call(StatusCall(), GRANT_TIMEOUT_S)

    def take_answer(self, answer: RankAnswer) -> None:
        """Update ``is_pause`` and ``rejects`` from a rank's answer, also from a late one.

        A draining update's pause is left out: SGLang's readers do not treat an update as a pause.
        """
        match answer:
            case Described(pause=pause):
                self._rejecting[rank_of(answer)] = pause.new_requests == "reject"
            case Paused(rejects=rejects) | Resumed(rejects=rejects):
                self._rejecting[rank_of(answer)] = rejects
        match answer:
            case Resumed(paused=paused) | Changed(paused=paused):
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
