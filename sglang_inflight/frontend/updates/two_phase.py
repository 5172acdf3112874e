"""One weight update across all ranks: stage everywhere, hear every vote, commit or drop.

    Open, Stage…, Seal ──▶ every rank stages and votes ──▶ all for it: Commit
                                                       └▶ otherwise:   Drop

Up to the commit nothing that is served has changed, so every failure ends in a drop, and
the old weights go on on every rank. The commit is one message, and ranks cannot fail it.
``phase.py`` has the moves of an update between the two.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from sglang_inflight.errors import ERRORS, Conflict, HalfDone, RankSilent, Refused
from sglang_inflight.frontend.bodies import OnBusy
from sglang_inflight.frontend.deadline import Deadline
from sglang_inflight.frontend.metrics import Metrics
from sglang_inflight.frontend.ranks import Ranks, require_success, say_which
from sglang_inflight.frontend.tasks import carry_through, keep
from sglang_inflight.frontend.updates.kv_policy import require_supported
from sglang_inflight.frontend.updates.open_update import OpenUpdate
from sglang_inflight.frontend.updates.phase import Event
from sglang_inflight.frontend.updates.receipt import write_receipt
from sglang_inflight.frontend.updates.served import Served
from sglang_inflight.frontend.updates.wanted import Wanted
from sglang_inflight.messages import (
    A,
    CommitCall,
    Committed,
    DropCall,
    Failed,
    InflightCall,
    MayRecomputeCall,
    RenameCall,
    RollbackCall,
    TensorSource,
)
from sglang_inflight.receipt import Receipt
from sglang_inflight.sglang_types.runtime_context import get_disagg

if TYPE_CHECKING:
    from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")

# A step may take long, and a commit waits for its end.
COMMIT_TIMEOUT_S = 120.0
# A rank whose staging thread hangs drops an update later; its caller need not wait.
DROP_TIMEOUT_S = 10.0
# Ranks keep the time limit themselves; one that hangs is given up this much later.
GRACE_S = 5.0

CALLER_HAS_LEFT = "its caller has left"


class TwoPhase:
    """Takes one update after the other through its phases. Lives on the front end's event loop.

    A turn lasts from the first call of an update to its commit or drop. ``_turn`` is held
    for it, across several calls in a session, and ``current`` is the update that has it.
    """

    def __init__(
        self,
        tokenizer_manager: TokenizerManager,
        ranks: Ranks,
        served: Served,
        metrics: Metrics,
    ) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._tasks = tokenizer_manager.asyncio_tasks
        self._ranks = ranks
        self._served = served
        self._metrics = metrics
        self._turn = asyncio.Lock()
        self.current: OpenUpdate | None = None

    # ---- turn ----------------------------------------------------------------------

    async def begin(self, update: OpenUpdate, on_busy: OnBusy, deadline: Deadline) -> None:
        """Wait for its turn, or raise ``Conflict``.

        Between the turn and ``current`` nothing is awaited, so a caller who leaves takes the
        turn along only where ``dropped_on_failure``, to be entered next, gives it back.
        """
        await self._take_turn(on_busy, deadline)
        self.current = update

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """No update goes on in the block. Raises ``Conflict`` where one does."""
        await self._take_turn("refuse", Deadline(COMMIT_TIMEOUT_S))
        try:
            yield
        finally:
            self._turn.release()

    async def _take_turn(self, on_busy: OnBusy, deadline: Deadline) -> None:
        if self._turn.locked():
            if on_busy == "refuse":
                raise Conflict(f"another weight update is going on{self._way_out}")
            if on_busy == "replace" and self.current is not None:
                await self.drop(self.current, "a newer update replaced it")
        try:
            async with asyncio.timeout(deadline.seconds_left):
                await self._turn.acquire()
        except TimeoutError:
            raise Conflict(
                f"another weight update went on until this one's time was over{self._way_out}"
            ) from None

    @property
    def _way_out(self) -> str:
        """Advice on the update that has the turn: the client of a session may be dead."""
        update = self.current
        if update is None or not update.opening.is_session:
            return ""
        return (
            f": session {update.id!r} is open. end_weight_update or abort_weight_update ends it, "
            'and on_busy="replace" takes its turn'
        )

    # ---- stage and vote ------------------------------------------------------------

    async def stage_whole(self, update: OpenUpdate, wanted: Wanted) -> None:
        """Open it, bring all its tensors, and hear the votes.

        Asked for at once: ranks keep the order, and it saves the waiting. Before a custom
        weight loader the opening is waited for: ranks make no step while a loader runs, nor
        while what was asked for before it is done.
        """
        self._add(update, wanted)
        deadline = wanted.deadline
        update.move(Event.SEAL)
        opening = asyncio.ensure_future(self._call(update.open_call(deadline), deadline))
        if isinstance(wanted.source, TensorSource) and wanted.source.has_custom_loader:
            await opening
        _, staged, votes = await _all_of(
            opening,
            self._call(update.stage_call(wanted), deadline),
            self._call(update.seal_call(deadline), deadline),
        )
        update.count(staged)
        update.count_votes(votes)
        update.move(Event.VOTE)

    async def open_session(self, session: OpenUpdate, deadline: Deadline) -> None:
        async with self.dropped_on_failure(session):
            # one that was dropped is not to be open on any rank
            session.require_alive()
            opened = await self._call(session.open_call(deadline), deadline)
            session.in_place = any(answer.in_place for answer in opened)
            session.require_alive()

    async def stage(self, session: OpenUpdate, wanted: Wanted) -> None:
        """Bring a piece of it."""
        self._add(session, wanted)
        session.count(await self._call(session.stage_call(wanted), wanted.deadline))
        session.require_alive()

    async def seal(self, session: OpenUpdate, deadline: Deadline) -> None:
        """Hear the votes. Nothing more is taken in."""
        async with self.dropped_on_failure(session):
            session.move(Event.SEAL)
            votes = await self._call(session.seal_call(deadline), deadline)
            session.move(Event.VOTE)
            session.count_votes(votes)

    def _add(self, update: OpenUpdate, wanted: Wanted) -> None:
        update.move(Event.STAGE)
        update.add(wanted)
        if wanted.uses_our_fields:
            require_supported(update.kv_policy, retracts=wanted.non_blocking)

    async def _call(self, call: InflightCall[A], deadline: Deadline) -> list[A]:
        return await self._ranks.call(call, deadline.seconds_left + GRACE_S)

    async def vote_on_kv(self, update: OpenUpdate, deadline: Deadline) -> None:
        """Raises ``Conflict`` where KV that is to be made anew cannot be, on any rank."""
        if update.kv_policy == "recompute" and get_disagg().disaggregation_mode != "null":
            await self._call(MayRecomputeCall(), deadline)
            update.require_alive()

    # ---- commit --------------------------------------------------------------------

    async def commit(self, update: OpenUpdate) -> Receipt:
        """Raises ``OutcomeUnknown`` where a rank was silent, ``HalfDone`` where some have
        committed and others could not.
        """
        # no await before it is sent: what is not dropped by now is committed
        update.move(Event.COMMIT)
        update.committing = keep(self._tasks, self._commit(update))
        return await asyncio.shield(update.committing)

    async def _commit(self, update: OpenUpdate) -> Receipt:
        call = CommitCall(
            update_id=update.id,
            weight_version=update.weight_version,
            kv_cache=update.kv_policy,
            torch_empty_cache=update.torch_empty_cache,
        )
        if update.aborts_requests:
            # ranks take it in before the commit: both go through one socket
            self._tokenizer_manager.abort_request(abort_all=True)
        self._served.expect(call, update)
        try:
            committed = await self._commit_everywhere(call, "commit")
        except BaseException:
            self._metrics.updates.labels("failed").inc()
            raise
        finally:
            self._leave(update, Event.END)
        receipt = write_receipt(committed, update)
        self._metrics.updates.labels("committed").inc()
        return receipt

    async def roll_back(self, call: RollbackCall, deadline: Deadline) -> Receipt:
        """In a turn of its own. Raises as ``commit`` does."""
        await self._take_turn("wait", deadline)
        return await carry_through(self._tasks, self._roll_back(call))

    async def _roll_back(self, call: RollbackCall) -> Receipt:
        try:
            committed = await self._commit_everywhere(call, "rollback")
        finally:
            self._turn.release()
        receipt = write_receipt(committed, None)
        self._metrics.updates.labels("rolled_back").inc()
        return receipt

    async def _commit_everywhere(
        self, call: CommitCall | RollbackCall, what: str
    ) -> list[Committed]:
        """Raises what a rank refused where all of them did, ``OutcomeUnknown`` where one is
        silent, and ``HalfDone`` where some have done it and others have not, or not all of it.
        """
        answers = await self._ranks.ask_to_carry_out(call, COMMIT_TIMEOUT_S)
        failed = [answer for answer in answers if isinstance(answer, Failed)]
        nothing_changed = all(issubclass(ERRORS[a.error], Refused) for a in failed)
        if failed and (len(failed) < len(answers) or not nothing_changed):
            raise HalfDone(f"The {what} is not whole: {say_which(failed)}")
        return require_success(answers)

    async def rename(self, call: RenameCall) -> None:
        """Beside whatever update goes on. Raises ``OutcomeUnknown`` where a rank is silent."""
        await self._ranks.carry_out(call, COMMIT_TIMEOUT_S)

    # ---- drop ----------------------------------------------------------------------

    async def drop(self, update: OpenUpdate, reason: str) -> None:
        """Forget an update on every rank, and give its turn away; not one that is sent."""
        if not update.allows(Event.DROP):
            return
        self._metrics.updates.labels("dropped").inc()
        update.why_dropped = reason
        self._leave(update, Event.DROP)
        try:
            await self._ranks.ask(DropCall(update_id=update.id, reason=reason), DROP_TIMEOUT_S)
        except RankSilent as error:
            # its shadow is refused to the next update until it has let go
            logger.error("Dropping a weight update: %s", error)

    def expire(self, update: OpenUpdate) -> None:
        """Its lease has run out."""
        if update.allows(Event.DROP):
            logger.warning("The lease of a weight-update session ran out: it is dropped.")
            keep(self._tasks, self.drop(update, "its lease ran out"))

    @asynccontextmanager
    async def dropped_on_failure(self, update: OpenUpdate) -> AsyncIterator[None]:
        """Whatever ends the block early, a cancelled caller too, drops the update."""
        try:
            yield
        except asyncio.CancelledError:
            await asyncio.shield(self.drop(update, CALLER_HAS_LEFT))
            raise
        except BaseException as error:
            await asyncio.shield(self.drop(update, f"{error}" or type(error).__name__))
            raise

    def _leave(self, update: OpenUpdate, event: Event) -> None:
        """It is over, and the next one has its turn."""
        assert self.current is update
        update.move(event)
        self.current = None
        self._turn.release()


async def _all_of(first: Awaitable[T], second: Awaitable[U], third: Awaitable[V]) -> tuple[T, U, V]:
    """Each to its end. The first in this order that failed is raised."""
    one, two = asyncio.ensure_future(first), asyncio.ensure_future(second)
    three = asyncio.ensure_future(third)
    await asyncio.gather(one, two, three, return_exceptions=True)
    return one.result(), two.result(), three.result()
