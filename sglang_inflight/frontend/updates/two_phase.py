"""One weight update across all ranks: stage, collect the votes, commit or drop.

    Open, Stage…, Seal ──▶ every rank stages and votes ──▶ all for it: Commit
                                                       └▶ otherwise:   Drop

Before the commit the served weights are unchanged. So every failure ends in a drop, and every
rank goes on serving the old weights. The commit is one message, and cannot fail on a rank.
``open_update.py`` has the phases of an update.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from sglang_inflight.capabilities import require_supported
from sglang_inflight.frontend.aio import Deadline, carry_through, keep
from sglang_inflight.frontend.ranks import Ranks, describe_failures, require_success
from sglang_inflight.frontend.updates.layouts import Layouts
from sglang_inflight.frontend.updates.open_update import (
    Event,
    OpenUpdate,
    expect_staged,
    write_receipt,
)
from sglang_inflight.frontend.updates.version_record import VersionRecord
from sglang_inflight.frontend.updates.wanted import Wanted
from sglang_inflight.joints import Joint
from sglang_inflight.messages import (
    A,
    CommitCall,
    Committed,
    DropCall,
    Failed,
    InflightCall,
    MayRecomputeCall,
    Opened,
    RenameCall,
    RollbackCall,
    Staged,
    has_custom_loader,
)
from sglang_inflight.metrics import FrontEndMetrics
from sglang_inflight.vocabulary.answers import Capabilities, Receipt
from sglang_inflight.vocabulary.bodies import OnBusy
from sglang_inflight.vocabulary.errors import (
    ERRORS,
    Conflict,
    HalfDone,
    RankSilent,
    Refused,
    Unproven,
)
from sglang_inflight.vocabulary.kept_kv import require_recompute

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")

# a commit waits for the end of a step, and a step may take long
COMMIT_TIMEOUT_S = 120.0
# short: a rank with a hanging staging thread drops the update later, without the caller
DROP_TIMEOUT_S = 10.0
# ranks keep time limits themselves; the front end waits this much longer
GRACE_S = 5.0
# between two tries to prove what some ranks could not, for reasons that may pass
_PROVE_AGAIN_S = 600.0

CALLER_HAS_LEFT = "its caller has left"

# waits, at most until the deadline, before an update is opened on the ranks
OPENINGS: Joint[Callable[[Ranks, Capabilities, OpenUpdate, Deadline], Awaitable[None]]] = Joint(
    "openings"
)


class TwoPhase:
    """Takes one update at a time through its phases. Lives on the front end's event loop.

    A turn lasts from an update's first call to its commit or drop, over all calls of a session.
    ``_turn`` is locked during a turn, and ``current`` is the update with the turn.
    """

    def __init__(
        self,
        tokenizer_manager: TokenizerManager,
        ranks: Ranks,
        record: VersionRecord,
        metrics: FrontEndMetrics,
        can: Capabilities,
    ) -> None:
        self._can = can
        self._tokenizer_manager = tokenizer_manager
        self._tasks = tokenizer_manager.asyncio_tasks
        self._ranks = ranks
        self._record = record
        self._metrics = metrics
        self.layouts = Layouts()
        self._turn = asyncio.Lock()
        self.current: OpenUpdate | None = None
        # whether the last update's opening has shown that the models can be staged
        self._is_staged = False
        # time.monotonic() at the last opening that asked all ranks for a proof, and got none
        self._unproven_at = -math.inf

    # ---- turn ----------------------------------------------------------------------

    async def begin(self, update: OpenUpdate, on_busy: OnBusy, deadline: Deadline) -> None:
        """Wait for the update's turn, or raise ``Conflict``.

        Nothing is awaited between taking the turn and setting ``current``. The caller must enter
        ``dropped_on_failure`` next, without an await: that gives the turn back on a cancellation.
        """
        await self._take_turn(on_busy, deadline)
        self.current = update

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Keep updates out of the block. Raises ``Conflict`` if an update has the turn."""
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
                f"another weight update did not end within this one's time limit{self._way_out}"
            ) from None

    @property
    def _way_out(self) -> str:
        """Advice for a caller blocked by a session: its client may be dead."""
        update = self.current
        if update is None or not update.opening.is_session:
            return ""
        return (
            f": session {update.id!r} is open. end_weight_update or abort_weight_update ends it, "
            'and on_busy="replace" takes its turn'
        )

    # ---- stage and vote ------------------------------------------------------------

    async def stage_whole(self, update: OpenUpdate, wanted: Wanted) -> None:
        """Open the update, stage all tensors, and collect the votes.

        The three calls are sent at once to save round trips: ranks keep their order. A custom
        weight loader runs only after the open call's answer: ranks make no step while the loader
        runs, nor while jobs queued before it run. The same holds for tensors written in place. The
        first update shows whether the model can be staged.
        """
        await self._prepare(update, wanted.deadline)
        self._add(update, wanted)
        deadline = wanted.deadline
        update.move(Event.SEAL)
        opening = asyncio.ensure_future(self._open(update, deadline))
        is_in_place = update.opening.why_in_place is not None
        if has_custom_loader(wanted.source) or is_in_place or not self._is_staged:
            await opening
        _, staged, votes = await _all_of(
            opening,
            self._stage(update, wanted),
            self._call(update.seal_call(deadline), deadline),
        )
        expect_staged(staged, wanted.expected_digest)
        update.count(staged)
        update.count_votes(votes)
        update.move(Event.VOTE)

    async def open_session(self, session: OpenUpdate, deadline: Deadline) -> None:
        async with self.dropped_on_failure(session):
            await self._prepare(session, deadline)
            # a session dropped by now must not be opened on any rank
            session.require_alive()
            opened = await self._open(session, deadline)
            session.in_place = any(answer.in_place for answer in opened)
            session.require_alive()

    async def _prepare(self, update: OpenUpdate, deadline: Deadline) -> None:
        for wait in OPENINGS:
            await wait(self._ranks, self._can, update, deadline)

    async def _open(self, update: OpenUpdate, deadline: Deadline) -> list[Opened]:
        """Open the update on all ranks, in place if one of them cannot stage its model.

        This process alone decides when ranks prove again, so that all of them do.
        """
        again = time.monotonic() >= self._unproven_at + _PROVE_AGAIN_S
        try:
            call = update.open_call(deadline, proves_again=again)
            opened = await self._call(call, deadline)
            self._is_staged = True
            return opened
        except Unproven as unproven:
            self._is_staged = False
            if again:
                self._unproven_at = time.monotonic()
            if self._can.in_place is not None or update.opening.asks_digests:
                raise
            why = f"{unproven}"
        logger.warning("Requests wait, and the update is written in place: %s", why)
        # the other ranks have opened it
        await self._ranks.ask(DropCall(update_id=update.id, reason=why), DROP_TIMEOUT_S)
        update.require_alive()
        update.opening = replace(update.opening, why_in_place=why)
        return await self._call(update.open_call(deadline), deadline)

    async def stage(self, session: OpenUpdate, wanted: Wanted) -> None:
        """Stage a piece of the session."""
        self._add(session, wanted)
        staged = await self._stage(session, wanted)
        expect_staged(staged, wanted.expected_digest)
        session.count(staged)
        session.require_alive()

    async def _stage(self, update: OpenUpdate, wanted: Wanted) -> list[Staged]:
        self.layouts.attach(wanted.source)
        return await self._call(update.stage_call(wanted), wanted.deadline)

    async def seal(self, session: OpenUpdate, deadline: Deadline) -> None:
        """Collect the votes. The session takes no more pieces."""
        async with self.dropped_on_failure(session):
            session.require_all_layouts()
            session.move(Event.SEAL)
            votes = await self._call(session.seal_call(deadline), deadline)
            session.move(Event.VOTE)
            session.count_votes(votes)

    async def expect(self, session: OpenUpdate, expected_digest: str | None) -> None:
        """Drop the sealed session, and raise ``Altered``, if it has not this digest."""
        async with self.dropped_on_failure(session):
            session.expect(expected_digest)

    def _add(self, update: OpenUpdate, wanted: Wanted) -> None:
        update.move(Event.STAGE)
        update.add(wanted)
        if wanted.uses_our_fields:
            require_supported(update.kept_kv, self._can, retracts=wanted.non_blocking)

    async def _call(self, call: InflightCall[A], deadline: Deadline) -> list[A]:
        return await self._ranks.call(call, deadline.seconds_left + GRACE_S)

    async def vote_on_kv(self, update: OpenUpdate, deadline: Deadline) -> None:
        """Raise ``Conflict`` if a rank cannot recompute its KV and the policy asks for it.

        Raise ``Refused`` if the policy does not ask for it, and the update needs it.
        """
        require_recompute(update.kept_kv, update.kv_scale, "the update")
        if update.kept_kv.flushes and self._can.recompute is not None:
            await self._call(MayRecomputeCall(), deadline)
            update.require_alive()

    # ---- commit --------------------------------------------------------------------

    async def commit(self, update: OpenUpdate) -> Receipt:
        """Commit the update on all ranks.

        Raises ``OutcomeUnknown`` if a rank was silent, ``HalfDone`` if only some have committed.
        """
        # no await before the send, so that no drop comes between
        update.move(Event.COMMIT)
        update.committing = keep(self._tasks, self._commit(update))
        return await asyncio.shield(update.committing)

    async def _commit(self, update: OpenUpdate) -> Receipt:
        call = CommitCall(
            update_id=update.id,
            weight_version=update.weight_version,
            kept_kv=update.kept_kv,
            torch_empty_cache=update.torch_empty_cache,
            kv_scale=update.kv_scale,
        )
        if update.aborts_requests:
            # one socket carries both, so ranks handle the abort before the commit
            self._tokenizer_manager.abort_request(abort_all=True)
        self._record.expect(call, update)
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
        """Roll back in a turn of its own. Raises the same errors as ``commit``."""
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
        """Send a commit or rollback, and return every rank's answer.

        Raises the refusal if all ranks refused, ``OutcomeUnknown`` if a rank is silent, and
        ``HalfDone`` if only some ranks succeeded, or a rank failed midway.
        """
        answers = await self._ranks.ask_to_carry_out(call, COMMIT_TIMEOUT_S)
        failed = [answer for answer in answers if isinstance(answer, Failed)]
        nothing_changed = all(issubclass(ERRORS[a.error], Refused) for a in failed)
        if failed and (len(failed) < len(answers) or not nothing_changed):
            raise HalfDone(f"The {what} was not done on every rank: {describe_failures(failed)}")
        return require_success(answers)

    async def rename(self, call: RenameCall) -> None:
        """Rename, also during an update. Raises ``OutcomeUnknown`` if a rank is silent."""
        await self._ranks.carry_out(call, COMMIT_TIMEOUT_S)

    # ---- drop ----------------------------------------------------------------------

    async def drop(self, update: OpenUpdate, reason: str) -> None:
        """Drop an update on every rank and end its turn. Does nothing once its commit is sent."""
        if not update.allows(Event.DROP):
            return
        self._metrics.updates.labels("dropped").inc()
        update.why_dropped = reason
        self._leave(update, Event.DROP)
        try:
            await self._ranks.ask(DropCall(update_id=update.id, reason=reason), DROP_TIMEOUT_S)
        except RankSilent as error:
            # the silent rank refuses the next update until it has dropped this one
            logger.error("Dropping a weight update: %s", error)

    def expire(self, update: OpenUpdate) -> None:
        """Drop an update with an expired lease."""
        if update.allows(Event.DROP):
            logger.warning("The lease of a weight-update session ran out: it is dropped.")
            keep(self._tasks, self.drop(update, "its lease ran out"))

    @asynccontextmanager
    async def dropped_on_failure(self, update: OpenUpdate) -> AsyncIterator[None]:
        """Drop the update if the block raises, or its caller is cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            await asyncio.shield(self.drop(update, CALLER_HAS_LEFT))
            raise
        except BaseException as error:
            await asyncio.shield(self.drop(update, f"{error}" or type(error).__name__))
            raise

    def _leave(self, update: OpenUpdate, event: Event) -> None:
        """End the update and its turn."""
        assert self.current is update
        update.move(event)
        self.current = None
        self._turn.release()


async def _all_of(first: Awaitable[T], second: Awaitable[U], third: Awaitable[V]) -> tuple[T, U, V]:
    """Await all three to their ends, then raise the first error in this order."""
    one, two = asyncio.ensure_future(first), asyncio.ensure_future(second)
    three = asyncio.ensure_future(third)
    await asyncio.gather(one, two, three, return_exceptions=True)
    return one.result(), two.result(), three.result()
