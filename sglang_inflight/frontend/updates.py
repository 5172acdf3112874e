"""One weight update across all ranks: stage everywhere, hear every vote, commit or drop.

    caller ──▶ Open, Stage…, Seal ──▶ every rank stages and votes ──▶ all for it: Commit
                                                                   └▶ otherwise:   Drop

Up to the commit nothing that is served has changed, so every failure ends in a drop, and
the old weights go on on every rank. The commit is one message, and ranks cannot fail it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_memory

from sglang_inflight.errors import Conflict, Dropped, RankSilent, Refused
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
from sglang_inflight.frontend.groups import Groups
from sglang_inflight.frontend.metrics import Metrics
from sglang_inflight.frontend.model_update_lock import locked
from sglang_inflight.frontend.open_update import OpenUpdate
from sglang_inflight.frontend.ranks import Ranks, require_success
from sglang_inflight.frontend.receipt import Receipt, write_receipt
from sglang_inflight.messages import (
    CommitCall,
    DistributedSource,
    DropCall,
    InflightCall,
    KVPolicy,
    OpenCall,
    RankAnswer,
    RollbackCall,
    Selector,
    Source,
    StageCall,
)
from sglang_inflight.settings import Settings
from sglang_inflight.unsupported import why_no_pause

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

# A step may take long, and a commit waits for its end.
COMMIT_TIMEOUT_S = 120.0
# A rank whose staging thread hangs drops an update later; its caller need not wait.
DROP_TIMEOUT_S = 10.0
# Ranks keep the time limit themselves; one that hangs is given up this much later.
GRACE_S = 5.0


class Updates:
    """Updates of one server, one at a time. Lives on the front end's event loop.

    A turn lasts from the first call of an update to its commit or drop. ``_turn`` is
    held for it, across several calls in a session.
    """

    def __init__(
        self,
        tokenizer_manager: TokenizerManager,
        ranks: Ranks,
        groups: Groups,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._ranks = ranks
        self._groups = groups
        self._metrics = metrics
        self._settings = settings
        self._turn = asyncio.Lock()
        self._open: OpenUpdate | None = None

    @property
    def has_session(self) -> bool:
        """Whether a session is open, which the next call of ``update`` is a piece of."""
        return self._open is not None and self._open.is_session

    # ---- one call, or a session of many --------------------------------------------

    async def update(self, body: UpdateBody) -> Receipt:
        """One call: the whole update, or a piece of the session that is open.

        Raises ``Refused`` (or a child) with nothing changed on any rank.
        """
        source = body.source
        try:
            return await self._update(body, source)
        except BaseException as error:
            if isinstance(source, DistributedSource):
                giving_up = self._groups.give_up(source.group_name, source.transfer_id, error)
                besides = await asyncio.shield(giving_up)
                if besides and isinstance(error, Refused):
                    raise type(error)(f"{error}{besides}") from error
            raise

    async def _update(self, body: UpdateBody, source: Source) -> Receipt:
        if getattr(body, "abort_all_requests", False):
            self._tokenizer_manager.abort_request(abort_all=True)
        session = self._open
        if body.session_id is not None:
            session = self._require_session(body.session_id)
        if session is not None and session.is_session and not session.is_foreign(body):
            return await self._add(session, body, source)
        if isinstance(body, TensorBody | DistributedBody) and not body.non_blocking:
            raise Refused(
                "this update must run between begin_weight_update and end_weight_update, "
                "or with non_blocking=true"
            )
        async with locked(self._tokenizer_manager, body.non_blocking):
            update = await self._begin(
                body.selector,
                on_busy=body.on_busy,
                timeout_s=body.timeout_s,
            )
            async with self._dropped_on_failure(update):
                partial = body.sends_pieces if body.partial is None else body.partial
                await self._stage(
                    update,
                    body,
                    source,
                    opens=update.open_call(partial=partial, expected=body.expected_version),
                    seals=True,
                )
                return await self._commit(update)

    async def begin(self, body: BeginBody) -> dict[str, Any]:
        """Open a session, whose calls go live together at ``end``, or renew its lease.

        Raises ``Conflict`` where the session to be renewed is not open any more.
        """
        if body.session_id is not None:
            return self._renew(body, self._require_session(body.session_id))
        if self._open is not None and self._open.is_session and body.on_busy == "wait":
            raise Refused(
                "a weight-update session is already open; end or abort it first, "
                'or begin with on_busy="replace"'
            )
        async with locked(self._tokenizer_manager, body.non_blocking):
            update = await self._begin(body.selector, on_busy=body.on_busy, timeout_s=None)
        update.is_session, update.lease_s = True, body.lease_s
        async with self._dropped_on_failure(update):
            call = update.open_call(partial=body.partial, expected=body.expected_version)
            require_success(await self._ranks.call(call, update.seconds_left() + GRACE_S))
            update.renew_lease()
        return {"success": True, "message": "Success", "session_id": update.id}

    async def seal(self, body: SealBody) -> Receipt:
        """Check the session's tensors on every rank: after this its commit cannot fail.

        What is sealed may be ended or aborted, and takes in no more. Sealing twice is
        sealing once, so a caller who lost the answer may ask again.
        """
        update = self._require_session(body.session_id)
        async with self._dropped_on_failure(update):
            await self._seal(update)
            update.renew_lease()
        return self._describe(update, "Sealed. It goes live at end_weight_update.")

    async def end(self, body: EndBody) -> Receipt:
        """Seal the session, where that is not done, and commit it."""
        update = self._require_session(body.session_id)
        if body.kv_cache is not None or body.flush_cache is not None:
            update.kv_cache = choose_kv_policy(bool(body.flush_cache), body.kv_cache)
        self._allow(update.kv_policy, retracts=body.non_blocking)
        update.weight_version = body.weight_version or update.weight_version
        update.torch_empty_cache |= body.torch_empty_cache
        async with (
            self._dropped_on_failure(update),
            locked(self._tokenizer_manager, body.non_blocking),
        ):
            await self._seal(update)
            return await self._commit(update)

    async def abort(self, body: AbortUpdateBody) -> None:
        """Drop the session, and the tensors staged in it."""
        await self._drop(self._require_session(body.session_id), "it was aborted by a caller")

    async def roll_back(self, body: RollbackBody) -> Receipt:
        """Return to the version before the last commit, whose weights are still here."""
        async with self._turn:
            call = RollbackCall(
                call_id="",
                weight_version=body.weight_version,
                kv_cache=self._allow(body.kv_policy, retracts=True),
            )
            answers = await self._ranks.call(call, COMMIT_TIMEOUT_S)
            require_success(answers)
        receipt = write_receipt(
            answers, staged_s=0.0, nbytes=0, tensors=0, message="Rolled the weights back."
        )
        self._metrics.updates.labels("rolled_back").inc()
        self._publish(receipt["weight_version"])
        return receipt

    # ---- stations ------------------------------------------------------------------

    async def _begin(
        self, selector: Selector | None, *, on_busy: OnBusy, timeout_s: float | None
    ) -> OpenUpdate:
        if self._turn.locked():
            if on_busy == "refuse":
                raise Conflict("another weight update is going on")
            if on_busy == "replace" and self._open is not None and not self._open.is_committing:
                await self._drop(self._open, "a newer update replaced it")
        await self._turn.acquire()
        self._open = OpenUpdate(
            id=uuid.uuid4().hex,
            selector=selector,
            deadline=self._deadline(timeout_s),
            expire=self._expire,
        )
        return self._open

    async def _add(self, session: OpenUpdate, body: UpdateBody, source: Source) -> Receipt:
        if session.vote is not None:
            raise Conflict("the weight-update session is sealed: end or abort it")
        session.deadline = self._deadline(body.timeout_s)
        async with self._dropped_on_failure(session):
            session.claim(body)
            if body.expected_version is not None:
                raise Refused("expected_version belongs to begin_weight_update in a session")
            session.renew_lease()
            await self._stage(session, body, source, opens=None, seals=False)
            session.renew_lease()
        return self._describe(session, "Staged. It goes live at end_weight_update.")

    async def _stage(
        self,
        update: OpenUpdate,
        body: UpdateBody,
        source: Source,
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
                timeout_s=update.seconds_left(),
            )
        )
        if seals:
            calls.append(update.seal_call())
        results = await asyncio.gather(
            *(self._ranks.call(call, update.seconds_left() + GRACE_S) for call in calls),
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

    async def _seal(self, update: OpenUpdate) -> None:
        """Hear the vote. There is one, however many ask for it."""
        if update.vote is None:
            update.vote = asyncio.ensure_future(self._take_vote(update))
        await asyncio.shield(update.vote)

    async def _take_vote(self, update: OpenUpdate) -> None:
        answers = await self._ranks.call(update.seal_call(), update.seconds_left() + GRACE_S)
        require_success(answers)
        update.staged_s += _longest(answers)

    async def _commit(self, update: OpenUpdate) -> Receipt:
        update.is_committing = True
        call = CommitCall(
            call_id="",
            update_id=update.id,
            weight_version=update.weight_version,
            kv_cache=update.kv_policy,
            torch_empty_cache=update.torch_empty_cache,
        )
        try:
            answers = await self._ranks.call(call, COMMIT_TIMEOUT_S)
        except RankSilent as error:
            raise RankSilent(
                f"The update was voted for and its commit was sent, but {error}. The silent "
                "rank commits when it comes to its next step boundary, or it is dead."
            ) from error
        require_success(answers)
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
        self._close(update)
        self._publish(receipt["weight_version"])
        if update.kv_cache == "recompute" and self._tokenizer_manager.mm_processor is not None:
            self._tokenizer_manager.mm_processor.clear_preprocess_cache()
        if update.model_path is not None:
            self._tokenizer_manager._update_model_path_info(
                update.model_path,
                update.load_format or self._tokenizer_manager.config_value("load_format"),
            )
        return receipt

    async def _drop(self, update: OpenUpdate, reason: str) -> None:
        """Forget an update on every rank, and give its turn away."""
        if self._open is not update:
            return
        self._metrics.updates.labels("dropped").inc()
        self._close(update)
        call = DropCall(call_id="", update_id=update.id, reason=reason)
        try:
            await self._ranks.call(call, DROP_TIMEOUT_S)
        except RankSilent as error:
            # its shadow is refused to the next update until it has let go
            logger.error("Dropping a weight update: %s", error)

    def _close(self, update: OpenUpdate) -> None:
        update.end_lease()
        if self._open is update:
            self._open = None
            self._turn.release()

    @asynccontextmanager
    async def _dropped_on_failure(self, update: OpenUpdate) -> AsyncIterator[None]:
        """Whatever ends the block early, a cancelled caller too, drops the update."""
        try:
            yield
            if self._open is not update and not update.is_committing:
                raise Dropped("the update was dropped before its commit")
        except BaseException as error:
            await asyncio.shield(self._drop(update, f"{error or type(error).__name__}"))
            raise

    # ---- small things --------------------------------------------------------------

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
        if update.is_committing:
            raise Conflict("the weight-update session is being committed")
        return update

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
        if update.is_committing:
            return
        logger.warning("The lease of a weight-update session ran out: it is dropped.")
        task = asyncio.ensure_future(self._drop(update, "its lease ran out"))
        self._tokenizer_manager.asyncio_tasks.add(task)
        task.add_done_callback(self._tokenizer_manager.asyncio_tasks.discard)

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (timeout_s or self._settings.update_timeout_s)

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
