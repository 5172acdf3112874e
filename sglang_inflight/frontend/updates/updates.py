"""Who calls for updates: one call that is a whole one, or a session of many.

What an update waits for, and in this order: its turn, then (where it blocks) that no request
runs, then the ranks. Each wait has the call's time limit, and ends when its caller leaves. A
commit that was sent is carried through whoever waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from sglang_inflight.errors import Conflict, Dropped, Refused
from sglang_inflight.frontend.bodies import (
    AbortUpdateBody,
    BeginBody,
    EndBody,
    NameBody,
    RollbackBody,
    SealBody,
    UpdateBody,
)
from sglang_inflight.frontend.deadline import Deadline
from sglang_inflight.frontend.tasks import keep
from sglang_inflight.frontend.updates.drain import NoRequestsRunning
from sglang_inflight.frontend.updates.groups import Groups
from sglang_inflight.frontend.updates.kv_policy import require_supported
from sglang_inflight.frontend.updates.open_update import OpenUpdate
from sglang_inflight.frontend.updates.phase import Event, Phase
from sglang_inflight.frontend.updates.two_phase import CALLER_HAS_LEFT, TwoPhase
from sglang_inflight.frontend.updates.wanted import Ending, Opening, Wanted
from sglang_inflight.messages import RenameCall, RollbackCall
from sglang_inflight.receipt import Begun, Receipt, StagedSoFar
from sglang_inflight.settings import Settings

if TYPE_CHECKING:
    from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager


class Updates:
    """Updates of one server, one at a time. Lives on the front end's event loop."""

    def __init__(
        self,
        tokenizer_manager: TokenizerManager,
        two_phase: TwoPhase,
        groups: Groups,
        idle: NoRequestsRunning,
        settings: Settings,
    ) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._two_phase = two_phase
        self._groups = groups
        self._idle = idle
        self._settings = settings
        # the session that was begun last, whatever became of it, until a caller has ended it
        self._last: OpenUpdate | None = None

    @property
    def has_session(self) -> bool:
        """Whether a session is open."""
        return self._session is not None

    @property
    def unnamed_session(self) -> OpenUpdate | None:
        """The open session, where its pieces need not name it."""
        session = self._session
        return session if session is not None and session.takes_unnamed else None

    def lose(self, session: OpenUpdate, why: str) -> None:
        """Drop ``session``, of which something is missing, and wait for nothing."""
        keep(self._tokenizer_manager.asyncio_tasks, self._two_phase.drop(session, why))

    @property
    def _session(self) -> OpenUpdate | None:
        update = self._two_phase.current
        return update if update is not None and update.opening.is_session else None

    # ---- one call --------------------------------------------------------------------

    async def update(self, body: UpdateBody) -> Receipt | StagedSoFar:
        """One call: the whole update, or a piece of the session that is open.

        Raises ``Refused`` (or a child) with nothing changed on any rank, ``OutcomeUnknown``
        where a rank was silent after the commit was sent, ``HalfDone`` where some have
        committed and others could not.
        """
        source = body.source
        async with self._groups.mark_broken_on_failure(source):
            wanted = Wanted.of(body, source, self._deadline(body.timeout_s))
            session = self._session_for(wanted)
            if session is not None:
                return await self._add(session, wanted)
            return await self._update(wanted)

    async def _update(self, wanted: Wanted) -> Receipt:
        update = OpenUpdate(Opening.of_call(wanted), self._two_phase.expire)
        await self._two_phase.begin(update, wanted.on_busy, wanted.deadline)
        async with self._two_phase.dropped_on_failure(update), AsyncExitStack() as stack:
            # one that ends all requests at its commit need not wait for their end
            if not wanted.non_blocking and not wanted.aborts_requests:
                await self._idle.enter(stack, update, wanted.deadline)
            await self._two_phase.stage_whole(update, wanted)
            await self._two_phase.vote_on_kv(update, wanted.deadline)
            return await self._two_phase.commit(update)

    async def roll_back(self, body: RollbackBody) -> Receipt:
        """Return to the version before the last commit, whose weights are still here.

        Raises ``Conflict`` where ``expected_version`` is not what is serving: who tries again
        because an answer was lost names it, and does not undo the first try.
        """
        require_supported(body.kv_policy, retracts=True)
        call = RollbackCall(
            weight_version=body.weight_version,
            expected_version=body.expected_version,
            kv_cache=body.kv_policy,
        )
        return await self._two_phase.roll_back(call, self._deadline(None))

    async def rename(self, body: NameBody) -> dict[str, Any]:
        """Tokens that come from now on have the new name, and the epoch that they had."""
        if body.abort_all_requests:
            self._tokenizer_manager.abort_request(abort_all=True)
        await self._two_phase.rename(RenameCall(weight_version=body.new_version))
        return {
            "success": True,
            "message": f"Weight version updated to {body.new_version}",
            "new_version": body.new_version,
        }

    # ---- a session of many -------------------------------------------------------------

    async def begin(self, body: BeginBody) -> Begun:
        """Open a session, whose calls go live together at ``end``, or renew its lease.

        Raises ``Conflict`` where the session to be renewed is not open any more.
        """
        if body.session_id is not None:
            return self._renew(body, self._require_session(body.session_id))
        if (before := self._session) is not None:
            if body.new_id == before.id:
                # this very call was made before, and its answer was lost
                return await self._open(before)
            if body.on_busy == "wait":
                raise Refused(
                    "a weight-update session is already open; end or abort it first, "
                    'or begin with on_busy="replace"'
                )
        session = OpenUpdate(Opening.of_session(body), self._two_phase.expire)
        await self._two_phase.begin(session, body.on_busy, self._deadline(None))
        self._last = session
        return await self._open(session)

    async def _open(self, session: OpenUpdate) -> Begun:
        deadline = self._deadline(None)
        await session.being_opened.join(
            lambda: self._two_phase.open_session(session, deadline),
            lambda: self._two_phase.drop(session, CALLER_HAS_LEFT),
        )
        session.renew_lease()
        return Begun(message="Success", session_id=session.id)

    async def _add(self, session: OpenUpdate, wanted: Wanted) -> StagedSoFar:
        if not session.allows(Event.STAGE):
            raise Conflict("the weight-update session is sealed: end or abort it")
        async with self._two_phase.dropped_on_failure(session):
            session.claim(wanted)
            if wanted.expected_version is not None:
                raise Refused("expected_version belongs to begin_weight_update in a session")
            session.renew_lease()
            await self._two_phase.stage(session, wanted)
            session.renew_lease()
        return self._describe(session, "Staged. It goes live at end_weight_update.")

    async def seal(self, body: SealBody) -> StagedSoFar:
        """Check the session's tensors on every rank: after this its commit cannot fail.

        What is sealed may be ended or aborted, and takes in no more. Sealing twice is
        sealing once, so a caller who lost the answer may ask again.
        """
        session = self._require_named(body.session_id)
        self._require_uncommitted(session)
        await self._seal(session, self._deadline(None))
        session.renew_lease()
        return self._describe(session, "Sealed. It goes live at end_weight_update.")

    async def _seal(self, session: OpenUpdate, deadline: Deadline) -> None:
        await session.being_sealed.join(lambda: self._two_phase.seal(session, deadline))

    async def end(self, body: EndBody) -> Receipt:
        """Seal the session, where that is not done, and commit it.

        Who asks for the end of one that is being ended hears how that ends.
        """
        with self._no_more_pieces(body.session_id):
            session = self._require_named(body.session_id)
            ending = Ending.of(body)
            if ending.uses_our_fields:
                policy = ending.kv_policy or session.kv_policy
                require_supported(policy, retracts=ending.non_blocking)
            return await session.being_ended.join(lambda: self._end(session, ending))

    async def _end(self, session: OpenUpdate, ending: Ending) -> Receipt:
        if session.committing is not None:
            # all who had asked for it have left
            return await asyncio.shield(session.committing)
        deadline = self._deadline(None)
        async with self._two_phase.dropped_on_failure(session), AsyncExitStack() as stack:
            session.finish(ending)
            # requests that are held would be waited for in vain
            waits = not (ending.non_blocking or session.aborts_requests or session.in_place)
            if waits:
                await self._idle.enter(stack, session, deadline)
            await self._seal(session, deadline)
            await self._two_phase.vote_on_kv(session, deadline)
            return await self._two_phase.commit(session)

    async def abort(self, body: AbortUpdateBody) -> None:
        """Drop the session, and the tensors staged in it. Anybody may, by its name or without."""
        with self._no_more_pieces(body.session_id):
            if body.session_id is None and self._session is None and self._lost is not None:
                # it was dropped before, and its pieces are not waited for any more
                return
            session = self._require_session(body.session_id)
            self._require_uncommitted(session)
            await self._two_phase.drop(session, "it was aborted by a caller")

    async def let_go(self, why: str) -> None:
        """Drop the session where it holds requests, none of which could end before it does."""
        session = self._session
        if session is not None and session.in_place:
            await self._two_phase.drop(session, why)

    # ---- which session -----------------------------------------------------------------

    def _session_for(self, wanted: Wanted) -> OpenUpdate | None:
        """The session that a call is a piece of, or None where it is an update of its own."""
        if wanted.session_id is not None:
            return self._require_session(wanted.session_id)
        session = self._session
        if session is not None and not session.is_foreign(wanted):
            return session
        if session is not None and wanted.is_upstreams_piece:
            raise Conflict(
                "the weight-update session that is open takes calls that name it: pass the "
                "session_id that begin_weight_update answered with"
            )
        if (lost := self._lost) is not None and lost.takes_unnamed and wanted.is_upstreams_piece:
            raise Dropped(
                f"the weight-update session that this is a piece of was dropped: "
                f"{lost.why_dropped}. end_weight_update or abort_weight_update ends it, and "
                "begin_weight_update begins anew"
            )
        return None

    @property
    def _lost(self) -> OpenUpdate | None:
        """A session that was dropped, where its client may still send pieces of it.

        Alone each of them would be an update of its own, and part of the weights would go live.
        A client that died neither ends its session nor begins another one, so its session is
        forgotten after the time that an update may take.
        """
        last = self._last
        if last is None or last.phase is not Phase.DROPPED:
            return None
        if time.monotonic() > last.dropped_at + self._settings.update_timeout_s:
            return None
        return last

    @contextmanager
    def _no_more_pieces(self, session_id: str | None) -> Iterator[None]:
        """Around a call by which a client ends its session: it sends no more pieces of one that
        was dropped.
        """
        try:
            yield
        finally:
            if (lost := self._lost) is not None and session_id in (None, lost.id):
                self._last = None

    def _require_session(self, session_id: str | None) -> OpenUpdate:
        """The open session; ``Conflict`` where it is another one than ``session_id``."""
        session, lost = self._session, self._lost
        if session_id is not None and (session is None or session.id != session_id):
            if lost is not None and lost.id == session_id:
                raise Conflict(
                    f"session_id {session_id!r} is not open: it was dropped: {lost.why_dropped}"
                )
            raise Conflict(
                f"session_id {session_id!r} is not open: it was ended or dropped (by a failed "
                "call, or because its lease ran out)"
            )
        if session is None:
            if lost is not None:
                raise Dropped(
                    "no weight-update session is open: the last one was dropped, and nothing of "
                    f"it is served: {lost.why_dropped}. Call begin_weight_update and send all of "
                    "it again"
                )
            raise Refused(
                "no weight-update session is open; call begin_weight_update first (a failed "
                "call or a lease that ran out drops a session)"
            )
        return session

    def _require_named(self, session_id: str | None) -> OpenUpdate:
        """As above; a session whose pieces must name it is ended by who names it."""
        session = self._require_session(session_id)
        if session_id is None and not session.opening.takes_unnamed:
            raise Conflict(
                "the weight-update session that is open is ended by who names it: pass the "
                "session_id that begin_weight_update answered with"
            )
        return session

    def _require_uncommitted(self, session: OpenUpdate) -> None:
        if session.phase is Phase.COMMITTING:
            raise Conflict("the weight-update session is being committed")

    def _renew(self, body: BeginBody, session: OpenUpdate) -> Begun:
        nothing_else = BeginBody(
            session_id=body.session_id, lease_s=body.lease_s, non_blocking=body.non_blocking
        )
        if body != nothing_else:
            raise Refused(
                "begin_weight_update with a session_id renews that session's lease, and takes "
                "no field besides but lease_s"
            )
        session.lease_s = body.lease_s or session.lease_s
        session.renew_lease()
        return Begun(message="The lease is renewed.", session_id=session.id)

    def _describe(self, session: OpenUpdate, message: str) -> StagedSoFar:
        return StagedSoFar(
            message=message,
            weight_version=self._tokenizer_manager.config_value("weight_version"),
            staged_s=session.staged_s,
            bytes=session.bytes,
            tensors=session.tensors,
        )

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(timeout_s or self._settings.update_timeout_s)
