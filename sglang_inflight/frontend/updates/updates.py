"""One weight update across all ranks: stage everywhere, hear every vote, commit or drop.

    caller ──▶ Open, Stage…, Seal ──▶ every rank stages and votes ──▶ all for it: Commit
                                                                   └▶ otherwise:   Drop

Up to the commit nothing that is served has changed, so every failure ends in a drop, and
the old weights go on on every rank. The commit is one message, and ranks cannot fail it.

What an update waits for, and in this order: its turn, then (where it blocks) that no request
runs, then the ranks. Each wait has the call's time limit, and ends when its caller leaves. A
commit that was sent is carried through whoever waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from sglang.srt.runtime_context import get_memory

from sglang_inflight.errors import (
    ERRORS,
    Conflict,
    Dropped,
    HalfDone,
    RankSilent,
    Refused,
)
from sglang_inflight.frontend.bodies import (
    AbortUpdateBody,
    BeginBody,
    DistributedBody,
    EndBody,
    OnBusy,
    RollbackBody,
    SealBody,
    TensorBody,
    UpdateBody,
    choose_kv_policy,
)
from sglang_inflight.frontend.deadline import Deadline
from sglang_inflight.frontend.metrics import Metrics
from sglang_inflight.frontend.ranks import Ranks, name_rank, require_success
from sglang_inflight.frontend.updates.groups import Groups
from sglang_inflight.frontend.updates.model_path import note_model_path
from sglang_inflight.frontend.updates.open_update import OpenUpdate, Phase
from sglang_inflight.frontend.updates.quiet import Quiet
from sglang_inflight.frontend.updates.receipt import Receipt, write_receipt
from sglang_inflight.messages import (
    CommitCall,
    DropCall,
    InflightCall,
    KVPolicy,
    OpenCall,
    RankAnswer,
    RollbackCall,
    Source,
    StageCall,
)
from sglang_inflight.settings import Settings
from sglang_inflight.unsupported import why_no_pause

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A step may take long, and a commit waits for its end.
COMMIT_TIMEOUT_S = 120.0
# A rank whose staging thread hangs drops an update later; its caller need not wait.
DROP_TIMEOUT_S = 10.0
# Ranks keep the time limit themselves; one that hangs is given up this much later.
GRACE_S = 5.0


class Updates:
    """Updates of one server, one at a time. Lives on the front end's event loop.

    A turn lasts from the first call of an update to its commit or drop. ``_turn`` is
    held for it, across several calls in a session, and ``_open`` is the update that has it.
    """

    def __init__(
        self,
        tokenizer_manager: TokenizerManager,
        ranks: Ranks,
        groups: Groups,
        quiet: Quiet,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._ranks = ranks
        self._groups = groups
        self._quiet = quiet
        self._metrics = metrics
        self._settings = settings
        self._turn = asyncio.Lock()
        self._open: OpenUpdate | None = None

    @property
    def has_session(self) -> bool:
        """Whether a session is open."""
        return self._open is not None and self._open.is_session

    # ---- one call, or a session of many --------------------------------------------

    async def update(self, body: UpdateBody) -> Receipt:
        """One call: the whole update, or a piece of the session that is open.

        Raises ``Refused`` (or a child) with nothing changed on any rank, ``OutcomeUnknown``
        where a rank was silent after the commit was sent, ``HalfDone`` where some have
        committed and others could not.
        """
        source = body.source
        async with self._groups.in_step(source):
            deadline = self._deadline(body.timeout_s)
            session = self._session_for(body)
            if session is not None:
                return await self._add(session, body, source, deadline)
            return await self._update(body, source, deadline)

    async def _update(self, body: UpdateBody, source: Source, deadline: Deadline) -> Receipt:
        update = await self._begin(
            OpenUpdate(uuid.uuid4().hex, body.selector, self._expire), body.on_busy, deadline
        )
        async with self._dropped_on_failure(update), AsyncExitStack() as stack:
            # one that ends all requests at its commit need not wait for their end
            if not body.non_blocking and not body.abort_all_requests:
                await self._wait_for_quiet(stack, update, deadline)
            partial = body.sends_pieces if body.partial is None else body.partial
            opens = update.open_call(
                partial=partial, expected=body.expected_version, deadline=deadline
            )
            await self._stage(update, body, source, deadline, opens=opens, seals=True)
            update.phase = Phase.SEALED
            return await self._commit(update)

    async def begin(self, body: BeginBody) -> dict[str, Any]:
        """Open a session, whose calls go live together at ``end``, or renew its lease.

        Raises ``Conflict`` where the session to be renewed is not open any more.
        """
        if body.session_id is not None:
            return self._renew(body, self._require_session(body.session_id))
        if self.has_session:
            assert self._open is not None
            if body.new_id == self._open.id:
                # this very call was made before, and its answer was lost
                return await self._begin_session(self._open, body)
            if body.on_busy == "wait":
                raise Refused(
                    "a weight-update session is already open; end or abort it first, "
                    'or begin with on_busy="replace"'
                )
        session = OpenUpdate(
            body.new_id or uuid.uuid4().hex,
            body.selector,
            self._expire,
            is_session=True,
            takes_unnamed=not body.non_blocking,
            lease_s=body.lease_s,
        )
        await self._begin(session, body.on_busy, self._deadline(None))
        return await self._begin_session(session, body)

    async def _begin_session(self, session: OpenUpdate, body: BeginBody) -> dict[str, Any]:
        await session.opening.join(lambda: self._open_on_ranks(session, body))
        session.renew_lease()
        return {"success": True, "message": "Success", "session_id": session.id}

    async def _open_on_ranks(self, session: OpenUpdate, body: BeginBody) -> None:
        deadline = self._deadline(None)
        async with self._dropped_on_failure(session):
            call = session.open_call(
                partial=body.partial, expected=body.expected_version, deadline=deadline
            )
            require_success(await self._ranks.call(call, deadline.seconds_left + GRACE_S))
            self._require_alive(session)

    async def seal(self, body: SealBody) -> Receipt:
        """Check the session's tensors on every rank: after this its commit cannot fail.

        What is sealed may be ended or aborted, and takes in no more. Sealing twice is
        sealing once, so a caller who lost the answer may ask again.
        """
        update = self._require_named(body.session_id)
        if update.phase is Phase.COMMITTING:
            raise Conflict("the weight-update session is being committed")
        await update.sealing.join(lambda: self._seal(update, self._deadline(None)))
        update.renew_lease()
        return self._describe(update, "Sealed. It goes live at end_weight_update.")

    async def end(self, body: EndBody) -> Receipt:
        """Seal the session, where that is not done, and commit it.

        Who asks for the end of one that is being ended hears how that ends.
        """
        update = self._require_named(body.session_id)
        kv_cache = update.kv_policy
        if body.kv_cache is not None or body.flush_cache is not None:
            kv_cache = choose_kv_policy(bool(body.flush_cache), body.kv_cache)
        self._allow(kv_cache, retracts=body.non_blocking)
        return await update.ending.join(lambda: self._end(update, body, kv_cache))

    async def _end(self, update: OpenUpdate, body: EndBody, kv_cache: KVPolicy) -> Receipt:
        deadline = self._deadline(None)
        async with self._dropped_on_failure(update), AsyncExitStack() as stack:
            update.kv_cache = kv_cache
            update.weight_version = body.weight_version or update.weight_version
            update.torch_empty_cache |= body.torch_empty_cache
            if not body.non_blocking and not update.aborts_requests:
                await self._wait_for_quiet(stack, update, deadline)
            await update.sealing.join(lambda: self._seal(update, deadline))
            return await self._commit(update)

    async def abort(self, body: AbortUpdateBody) -> None:
        """Drop the session, and the tensors staged in it. Anybody may, by its name or without."""
        update = self._require_session(body.session_id)
        if not update.is_droppable:
            raise Conflict("the weight-update session is being committed")
        await self._drop(update, "it was aborted by a caller")

    async def roll_back(self, body: RollbackBody) -> Receipt:
        """Return to the version before the last commit, whose weights are still here.

        Raises ``Conflict`` where ``expected_version`` is not what is serving: who tries again
        because an answer was lost names it, and does not undo the first try.
        """
        call = RollbackCall(
            call_id="",
            weight_version=body.weight_version,
            expected_version=body.expected_version,
            kv_cache=self._allow(body.kv_policy, retracts=True),
        )
        await self._take_turn("wait", self._deadline(None))
        return await self._carry_through(self._roll_back(call))

    async def _roll_back(self, call: RollbackCall) -> Receipt:
        try:
            answers = await self._commit_everywhere(call, "rollback")
        finally:
            self._turn.release()
        receipt = write_receipt(
            answers, staged_s=0.0, nbytes=0, tensors=0, message="Rolled the weights back."
        )
        self._metrics.updates.labels("rolled_back").inc()
        self._publish(receipt["weight_version"])
        return receipt

    # ---- stations ------------------------------------------------------------------

    async def _begin(self, update: OpenUpdate, on_busy: OnBusy, deadline: Deadline) -> OpenUpdate:
        await self._take_turn(on_busy, deadline)
        self._open = update
        return update

    async def _take_turn(self, on_busy: OnBusy, deadline: Deadline) -> None:
        if self._turn.locked():
            if on_busy == "refuse":
                raise Conflict("another weight update is going on")
            if on_busy == "replace" and self._open is not None and self._open.is_droppable:
                await self._drop(self._open, "a newer update replaced it")
        try:
            async with asyncio.timeout(deadline.seconds_left):
                await self._turn.acquire()
        except TimeoutError:
            raise Conflict("another weight update went on until this one's time was over") from None

    async def _wait_for_quiet(
        self, stack: AsyncExitStack, update: OpenUpdate, deadline: Deadline
    ) -> None:
        """Hold requests back until ``stack`` is closed; not for an update that is dropped."""
        waiting = asyncio.ensure_future(
            stack.enter_async_context(self._quiet.held(update.id, deadline))
        )
        ended = asyncio.ensure_future(update.ended.wait())
        try:
            await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
            self._require_alive(update)
            await waiting
        finally:
            for task in (waiting, ended):
                task.cancel()
            await asyncio.wait({waiting, ended})

    async def _add(
        self, session: OpenUpdate, body: UpdateBody, source: Source, deadline: Deadline
    ) -> Receipt:
        if session.phase is not Phase.OPEN:
            raise Conflict("the weight-update session is sealed: end or abort it")
        async with self._dropped_on_failure(session):
            session.claim(body)
            if body.expected_version is not None:
                raise Refused("expected_version belongs to begin_weight_update in a session")
            session.renew_lease()
            await self._stage(session, body, source, deadline, opens=None, seals=False)
            session.renew_lease()
        return self._describe(session, "Staged. It goes live at end_weight_update.")

    async def _stage(
        self,
        update: OpenUpdate,
        body: UpdateBody,
        source: Source,
        deadline: Deadline,
        *,
        opens: OpenCall | None,
        seals: bool,
    ) -> None:
        """Send what there is to send at once: ranks keep the order, and save the waiting."""
        update.note(body)
        self._allow(update.kv_policy, retracts=body.non_blocking)
        calls: list[InflightCall] = [opens] if opens is not None else []
        calls.append(
            StageCall(
                call_id="",
                update_id=update.id,
                source=source,
                selector=body.selector,
                timeout_s=deadline.seconds_left,
            )
        )
        if seals:
            calls.append(update.seal_call(deadline))
        results = await asyncio.gather(
            *(self._ranks.call(call, deadline.seconds_left + GRACE_S) for call in calls),
            return_exceptions=True,
        )
        for answers in results:
            if isinstance(answers, BaseException):
                raise answers
            require_success(answers)
            update.staged_s += _longest(answers)
        staged = results[1 if opens is not None else 0]
        assert not isinstance(staged, BaseException)
        update.tensors += staged[0].detail["tensors"]
        update.bytes += max(answer.detail["bytes"] for answer in staged)
        self._require_alive(update)

    async def _seal(self, update: OpenUpdate, deadline: Deadline) -> None:
        """Hear the vote."""
        async with self._dropped_on_failure(update):
            self._require_alive(update)
            update.phase = Phase.SEALING
            call = update.seal_call(deadline)
            answers = await self._ranks.call(call, deadline.seconds_left + GRACE_S)
            require_success(answers)
            self._require_alive(update)
            update.staged_s += _longest(answers)
            update.phase = Phase.SEALED

    async def _commit(self, update: OpenUpdate) -> Receipt:
        # no await between the two: what is not dropped by now is committed
        self._require_alive(update)
        update.phase = Phase.COMMITTING
        return await self._carry_through(self._commit_sealed(update))

    async def _commit_sealed(self, update: OpenUpdate) -> Receipt:
        call = CommitCall(
            call_id="",
            update_id=update.id,
            weight_version=update.weight_version,
            kv_cache=update.kv_policy,
            torch_empty_cache=update.torch_empty_cache,
        )
        if update.aborts_requests:
            # ranks take it in before the commit: both go through one socket
            self._tokenizer_manager.abort_request(abort_all=True)
        try:
            answers = await self._commit_everywhere(call, "commit")
        except BaseException:
            self._metrics.updates.labels("failed").inc()
            raise
        finally:
            self._close(update)
        receipt = write_receipt(
            answers,
            staged_s=update.staged_s,
            nbytes=update.bytes,
            tensors=update.tensors,
            message="Succeeded to update model weights."
            + (
                f" Weight version updated to {update.weight_version}."
                if update.weight_version is not None
                else ""
            ),
        )
        self._metrics.updates.labels("committed").inc()
        self._publish(receipt["weight_version"])
        if update.kv_cache == "recompute" and self._tokenizer_manager.mm_processor is not None:
            self._tokenizer_manager.mm_processor.clear_preprocess_cache()
        if update.model_path is not None:
            note_model_path(
                self._tokenizer_manager,
                update.model_path,
                update.load_format or self._tokenizer_manager.config_value("load_format"),
            )
        return receipt

    async def _commit_everywhere(
        self, call: CommitCall | RollbackCall, what: str
    ) -> list[RankAnswer]:
        """Raises what a rank refused where all of them did, ``OutcomeUnknown`` where one is
        silent, and ``HalfDone`` where some have done it and others have not, or not all of it.
        """
        answers = await self._ranks.carry_out(call, COMMIT_TIMEOUT_S)
        failed = [answer for answer in answers if not answer.success]
        nothing_changed = all(issubclass(ERRORS[a.error], Refused) for a in failed)
        if failed and (len(failed) < len(answers) or not nothing_changed):
            said = (f"{name_rank(a.dp_rank, a.pp_rank, a.tp_rank)}: {a.message}" for a in failed)
            raise HalfDone(f"The {what} is not whole: {'; '.join(said)}")
        require_success(answers)
        return answers

    async def _carry_through(self, doing: Coroutine[Any, Any, T]) -> T:
        """Its outcome. It goes on where the caller is gone: it cannot be called back."""
        task = asyncio.ensure_future(doing)
        self._keep(task)
        return await asyncio.shield(task)

    async def _drop(self, update: OpenUpdate, reason: str) -> None:
        """Forget an update on every rank, and give its turn away."""
        if not update.is_droppable:
            return
        self._metrics.updates.labels("dropped").inc()
        update.why_dropped = reason
        self._close(update)
        call = DropCall(call_id="", update_id=update.id, reason=reason)
        try:
            await self._ranks.call(call, DROP_TIMEOUT_S)
        except RankSilent as error:
            # its shadow is refused to the next update until it has let go
            logger.error("Dropping a weight update: %s", error)

    def _close(self, update: OpenUpdate) -> None:
        assert self._open is update
        update.phase = Phase.ENDED
        update.ended.set()
        update.end_lease()
        self._open = None
        self._turn.release()

    @asynccontextmanager
    async def _dropped_on_failure(self, update: OpenUpdate) -> AsyncIterator[None]:
        """Whatever ends the block early, a cancelled caller too, drops the update."""
        try:
            yield
        except BaseException as error:
            await asyncio.shield(self._drop(update, f"{error or type(error).__name__}"))
            raise

    # ---- small things --------------------------------------------------------------

    def _session_for(self, body: UpdateBody) -> OpenUpdate | None:
        """The session that a call is a piece of, or None where it is an update of its own."""
        if body.session_id is not None:
            return self._require_session(body.session_id)
        session = self._open if self.has_session else None
        if session is not None and not session.is_foreign(body):
            return session
        named_by_nobody = isinstance(body, TensorBody | DistributedBody) and not body.non_blocking
        if session is not None and named_by_nobody:
            raise Conflict(
                "the weight-update session that is open takes calls that name it: pass the "
                "session_id that begin_weight_update answered with"
            )
        return None

    def _require_session(self, session_id: str | None) -> OpenUpdate:
        """The open session; ``Conflict`` where it is another one than ``session_id``."""
        update = self._open if self.has_session else None
        if session_id is not None and (update is None or update.id != session_id):
            raise Conflict(
                f"session_id {session_id!r} is not open: it was ended or dropped (by a failed "
                "call, or because its lease ran out)"
            )
        if update is None:
            raise Refused(
                "no weight-update session is open; call begin_weight_update first (a failed "
                "call or a lease that ran out drops a session)"
            )
        return update

    def _require_named(self, session_id: str | None) -> OpenUpdate:
        """As above; a session whose pieces must name it is ended by who names it."""
        update = self._require_session(session_id)
        if session_id is None and not update.takes_unnamed:
            raise Conflict(
                "the weight-update session that is open is ended by who names it: pass the "
                "session_id that begin_weight_update answered with"
            )
        return update

    def _require_alive(self, update: OpenUpdate) -> None:
        """Raises ``Dropped`` where it was dropped while its ranks were waited for."""
        if update.phase is Phase.ENDED:
            raise Dropped(f"the update was dropped before its commit: {update.why_dropped}")

    def _renew(self, body: BeginBody, update: OpenUpdate) -> dict[str, Any]:
        nothing_else = BeginBody(
            session_id=body.session_id, lease_s=body.lease_s, non_blocking=body.non_blocking
        )
        if body != nothing_else:
            raise Refused(
                "begin_weight_update with a session_id renews that session's lease, and takes "
                "no field besides but lease_s"
            )
        update.lease_s = body.lease_s or update.lease_s
        update.renew_lease()
        return {"success": True, "message": "The lease is renewed.", "session_id": update.id}

    def _describe(self, session: OpenUpdate, message: str) -> Receipt:
        return {
            "success": True,
            "message": message,
            "weight_version": self._tokenizer_manager.config_value("weight_version"),
            "staged_s": session.staged_s,
            "bytes": session.bytes,
            "tensors": session.tensors,
        }

    def _expire(self, update: OpenUpdate) -> None:
        if not update.is_droppable:
            return
        logger.warning("The lease of a weight-update session ran out: it is dropped.")
        self._keep(asyncio.ensure_future(self._drop(update, "its lease ran out")))

    def _keep(self, task: asyncio.Future[Any]) -> None:
        """The event loop itself keeps only a weak reference."""
        self._tokenizer_manager.asyncio_tasks.add(task)
        task.add_done_callback(self._tokenizer_manager.asyncio_tasks.discard)

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(timeout_s or self._settings.update_timeout_s)

    def _allow(self, kv_cache: KVPolicy, *, retracts: bool) -> KVPolicy:
        """``retracts`` where requests may be running at the commit."""
        if get_memory().enable_hierarchical_cache and kv_cache != "keep":
            raise Refused(
                f"kv_cache={kv_cache!r} is not supported with --enable-hierarchical-cache: its "
                'lower tiers keep prefixes of older weights; pass kv_cache="keep"'
            )
        if retracts and kv_cache == "recompute" and (reason := why_no_pause()) is not None:
            raise Refused(
                'kv_cache="recompute" (flush_cache=true) retracts running requests, as a pause '
                f'does: {reason}; pass kv_cache="fence" or "keep"'
            )
        return kv_cache

    def _publish(self, weight_version: str) -> None:
        self._tokenizer_manager._update_weight_version_if_provided(weight_version)


def _longest(answers: Sequence[RankAnswer]) -> float:
    return max((answer.detail.get("staged_s", 0.0) for answer in answers), default=0.0)
