"""Callers' updates: a single call, or a session of many calls.

An update waits first for its turn, then (if it blocks) for running requests, then for the ranks.
Each wait has the call's time limit, and ends when its caller disconnects. A sent commit runs to
its end, even without its caller.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from sglang_inflight.capabilities import require_supported
from sglang_inflight.frontend.aio import Deadline, keep
from sglang_inflight.frontend.updates.drain import NoRequestsRunning
from sglang_inflight.frontend.updates.groups import Groups
from sglang_inflight.frontend.updates.open_update import Event, OpenUpdate, Phase
from sglang_inflight.frontend.updates.two_phase import CALLER_HAS_LEFT, TwoPhase
from sglang_inflight.frontend.updates.wanted import Ending, Opening, Wanted, source_of
from sglang_inflight.messages import DiskSource, RenameCall, RollbackCall, ServedSource
from sglang_inflight.settings import Settings
from sglang_inflight.vocabulary.answers import Begun, Capabilities, Receipt, StagedSoFar
from sglang_inflight.vocabulary.bodies import (
    AbortUpdateBody,
    BeginBody,
    EndBody,
    NameBody,
    RollbackBody,
    SealBody,
    UpdateBody,
)
from sglang_inflight.vocabulary.errors import Conflict, Dropped, Outgrown, Refused
from sglang_inflight.vocabulary.kept_kv import KVPolicy

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

logger = logging.getLogger(__name__)
_Aged = TypeVar("_Aged", UpdateBody, EndBody, RollbackBody)


class Updates:
    """Updates of one server, one at a time. Lives on the front end's event loop."""

    def __init__(
        self,
        tokenizer_manager: TokenizerManager,
        two_phase: TwoPhase,
        groups: Groups,
        idle: NoRequestsRunning,
        settings: Settings,
        can: Capabilities,
    ) -> None:
        self._can = can
        self._tokenizer_manager = tokenizer_manager
        self._two_phase = two_phase
        self._groups = groups
        self._idle = idle
        self._settings = settings
        # the session begun last, open, ended or dropped, until a caller has ended it
        self._last: OpenUpdate | None = None

    @property
    def has_session(self) -> bool:
        """True if a session is open."""
        return self._session is not None

    @property
    def unnamed_session(self) -> OpenUpdate | None:
        """The open session, if its pieces need not name it."""
        session = self._session
        return session if session is not None and session.takes_unnamed else None

    def lose(self, session: OpenUpdate, why: str) -> None:
        """Drop ``session``, because a piece is missing, without waiting."""
        keep(self._tokenizer_manager.asyncio_tasks, self._two_phase.drop(session, why))

    @property
    def _session(self) -> OpenUpdate | None:
        update = self._two_phase.current
        return update if update is not None and update.opening.is_session else None

    def _with_age(self, body: _Aged) -> _Aged:
        """Return ``body`` with the setting's ``kv_max_age``, unless it names a policy."""
        most = self._settings.kv_max_age
        if most is None or body.kv_cache is not None or body.kv_max_age is not None:
            return body
        return msgspec.structs.replace(body, kv_max_age=most)

    def policy_or(self, kv_cache: KVPolicy) -> dict[str, Any]:
        """Return the fields of the setting's policy, or of ``kv_cache`` without a setting."""
        most = self._settings.kv_max_age
        return {"kv_cache": kv_cache} if most is None else {"kv_max_age": most}

    # ---- one call --------------------------------------------------------------------

    async def update(self, body: UpdateBody) -> Receipt | StagedSoFar:
        """Do a whole update in one call, or stage a piece of the open session.

        Raises ``Refused`` (or a child) if nothing has changed on any rank, ``OutcomeUnknown`` if a
        rank was silent after the commit was sent, ``HalfDone`` if only some ranks have committed.
        """
        source = source_of(body)
        body = self._with_age(body)
        async with self._groups.mark_broken_on_failure(source):
            wanted = Wanted.of(body, source, self._deadline(body.timeout_s), self._can)
            session = self._session_for(wanted)
            with self._two_phase.layouts.used_by(source, session):
                if session is not None:
                    return await self._add(session, wanted)
                return await self._update(wanted)

    async def _update(self, wanted: Wanted) -> Receipt:
        try:
            return await self._update_once(wanted)
        except Outgrown as outgrown:
            if not self._may_write_in_place(wanted):
                raise
            why = f"{outgrown}"
        logger.warning("Requests wait, and the update is written in place: %s", why)
        return await self._update_once(wanted, why)

    def _may_write_in_place(self, wanted: Wanted) -> bool:
        """Return whether an update that was dropped may be done anew, in place.

        Tensors were received and are gone. A checkpoint is still there, and so is another server's
        offer. Expected digests are compared before anything is written in place, and that needs
        staging.
        """
        is_there = isinstance(wanted.source, DiskSource | ServedSource)
        is_there = is_there and wanted.digests is None
        return is_there and self._settings.outgrown == "in_place" and self._can.in_place is None

    async def _update_once(self, wanted: Wanted, why_in_place: str | None = None) -> Receipt:
        opening = Opening.of_call(wanted, why_in_place)
        update = OpenUpdate(opening, self._two_phase.expire)
        await self._two_phase.begin(update, wanted.on_busy, wanted.deadline)
        async with self._two_phase.dropped_on_failure(update), AsyncExitStack() as stack:
            # with abort_all_requests the commit ends all requests, so do not wait for them
            if not wanted.non_blocking and not wanted.aborts_requests:
                await self._idle.enter(stack, update, wanted.deadline)
            await self._two_phase.stage_whole(update, wanted)
            await self._two_phase.vote_on_kv(update, wanted.deadline)
            return await self._two_phase.commit(update)

    async def roll_back(self, body: RollbackBody) -> Receipt:
        """Return to the version before the last commit.

        Raises ``Conflict`` if the served version is not ``expected_version``. With that field a
        retry after a lost answer does not undo the first rollback.
        """
        kept_kv = self._with_age(body).kept_kv
        require_supported(kept_kv, self._can, retracts=True)
        call = RollbackCall(
            weight_version=body.weight_version,
            expected_version=body.expected_version,
            kept_kv=kept_kv,
        )
        return await self._two_phase.roll_back(call, self._deadline(None))

    async def rename(self, body: NameBody) -> dict[str, Any]:
        """Rename the served version, in the same epoch."""
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
        """Open a session, or renew its lease. The session's calls go live together at ``end``.

        Raises ``Conflict`` if the session to renew is not open.
        """
        if body.session_id is not None:
            return self._renew(body, self._require_session(body.session_id))
        if (before := self._session) is not None:
            if body.new_id == before.id:
                # a retry of the same call after a lost answer
                return await self._open(before)
            if body.on_busy == "wait":
                raise Refused(
                    "a weight-update session is already open; end or abort it first, "
                    'or begin with on_busy="replace"'
                )
        opening = Opening.of_session(body, self._settings.sessions)
        session = OpenUpdate(opening, self._two_phase.expire)
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
        """Check the session's tensors on every rank, so that its commit cannot fail.

        A sealed session takes no more pieces; end or abort it. Sealing is idempotent, so a caller
        may retry after a lost answer.
        """
        session = self._require_named(body.session_id)
        self._require_uncommitted(session)
        await self._seal(session, self._deadline(None))
        await self._two_phase.expect(session, body.expected_digest)
        session.renew_lease()
        return self._describe(session, "Sealed. It goes live at end_weight_update.")

    async def _seal(self, session: OpenUpdate, deadline: Deadline) -> None:
        await session.being_sealed.join(lambda: self._two_phase.seal(session, deadline))

    async def end(self, body: EndBody) -> Receipt:
        """Commit the session, and seal it first if necessary.

        A second call during the first one gets the same answer.
        """
        with self._no_more_pieces(body.session_id):
            session = self._require_named(body.session_id)
            ending = self._ending_of(body, session)
            if ending.uses_our_fields:
                kept_kv = ending.kept_kv or session.kept_kv
                require_supported(kept_kv, self._can, retracts=ending.non_blocking)
            return await session.being_ended.join(lambda: self._end(session, ending))

    def _ending_of(self, body: EndBody, session: OpenUpdate) -> Ending:
        """Read ``body``. With the setting ``kv_max_age`` its ``flush_cache`` says nothing."""
        if session.asked_kv is None:
            return Ending.of(self._with_age(body))
        # the pieces have taken the setting, unless they say otherwise
        is_set = self._settings.kv_max_age is not None
        return Ending.of(msgspec.structs.replace(body, flush_cache=None) if is_set else body)

    async def _end(self, session: OpenUpdate, ending: Ending) -> Receipt:
        if session.committing is not None:
            # the earlier callers have disconnected
            return await asyncio.shield(session.committing)
        deadline = self._deadline(None)
        async with self._two_phase.dropped_on_failure(session), AsyncExitStack() as stack:
            session.finish(ending)
            # in_place holds requests back, so none would end
            waits = not (ending.non_blocking or session.aborts_requests or session.in_place)
            if waits:
                await self._idle.enter(stack, session, deadline)
            await self._seal(session, deadline)
            session.expect(ending.expected_digest)
            await self._two_phase.vote_on_kv(session, deadline)
            return await self._two_phase.commit(session)

    async def abort(self, body: AbortUpdateBody) -> None:
        """Drop the session and its staged tensors. Any caller may, with or without its id."""
        with self._no_more_pieces(body.session_id):
            if body.session_id is None and self._session is None and self._lost is not None:
                # already dropped; the call ends the refusal of its late pieces
                return
            session = self._require_session(body.session_id)
            self._require_uncommitted(session)
            await self._two_phase.drop(session, "it was aborted by a caller")

    async def drop_all(self, why: str) -> None:
        """Drop the session if it holds requests back: no request could end before it."""
        session = self._session
        if session is not None and session.in_place:
            await self._two_phase.drop(session, why)

    # ---- which session -----------------------------------------------------------------

    def _session_for(self, wanted: Wanted) -> OpenUpdate | None:
        """Return the call's session, or None if the call is an update of its own."""
        if wanted.session_id is not None:
            return self._require_session(wanted.session_id)
        session = self._session
        if session is not None and not session.is_foreign(wanted):
            return session
        if session is not None and wanted.is_upstreams_piece:
            raise Conflict(
                "the open weight-update session takes only calls with its session_id: pass the "
                "session_id from begin_weight_update's answer"
            )
        if (lost := self._lost) is not None and lost.takes_unnamed and wanted.is_upstreams_piece:
            raise Dropped(
                f"this call's weight-update session was dropped: {lost.why_dropped}. "
                "end_weight_update or abort_weight_update ends it, and begin_weight_update begins "
                "anew"
            )
        return None

    @property
    def _lost(self) -> OpenUpdate | None:
        """The last session, if it was dropped and its client may still send pieces.

        A late piece must not become an update of its own: part of the weights would go live. A
        dead client neither ends its session nor begins another one, so a dropped session is
        forgotten after an update's time limit.
        """
        last = self._last
        if last is None or last.phase is not Phase.DROPPED:
            return None
        if time.monotonic() > last.dropped_at + self._settings.update_timeout_s:
            return None
        return last

    @contextmanager
    def _no_more_pieces(self, session_id: str | None) -> Iterator[None]:
        """Forget a dropped session after the block, because its client has sent the last piece."""
        try:
            yield
        finally:
            if (lost := self._lost) is not None and session_id in (None, lost.id):
                self._last = None

    def _require_session(self, session_id: str | None) -> OpenUpdate:
        """Return the open session. Raises ``Conflict`` if ``session_id`` names another one."""
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
        """Return the open session. Raises ``Conflict`` if the session needs its ``session_id``."""
        session = self._require_session(session_id)
        if session_id is None and not session.opening.takes_unnamed:
            raise Conflict(
                "only a call with its session_id seals or ends the open weight-update session: "
                "pass the session_id from begin_weight_update's answer"
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
                "no other field but lease_s"
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
            unpatched=session.unpatched,
        )

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(timeout_s or self._settings.update_timeout_s)
