"""Transparent mode: stage weights in flight for clients written to pause, update and continue.

    call                          effect in this mode
    pause_generation              opens a *window*, and is granted at once
    flush_cache                   succeeds at once: the commit flushes or fences the cache
    an update, by any route       is staged into the window's session; the first begins it
    begin_weight_update           says how the session is begun. With ``expected_version`` it
                                  begins the session
    end_weight_update             says how the session ends, and ends nothing
    update_weight_version         names the version of the commit
    continue_generation           seals, votes and commits; answers with the outcome

The pause's mode decides about running requests at the commit: ``retract`` recomputes their KV,
``in_place`` keeps their KV (and fences it off from later requests), ``abort`` ends them with
their tokens so far. An explicit ``kv_cache`` overrides the mode's KV policy.

A field that a session would honour is honoured, and one that a session would refuse is refused.
All pieces of a window are staged over one served version, so each ``expected_version`` must be it.

A window becomes a real pause if memory is to be released, or if no weights arrive for a while. A
pause with a lease or an id is real from the beginning: its caller knows this server.

A failed piece drops the session, and nothing served has changed. The piece's answer has the
error, and so has the answer of ``continue_generation``, the only one some clients read.

``continue_generation`` waits for running pieces, and finishes even if its caller leaves. After a
lost answer the client repeats the call for the outcome: a failure is kept until it was delivered,
a success until the next pause. If a client begins a session and dies, the window becomes a real
pause after ``update_timeout_s``: the status shows the pause, ``continue_generation`` ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_inflight.capabilities import as_sglang_does
from sglang_inflight.extensions.transparent import TransparentSettings
from sglang_inflight.frontend.aio import SharedCall, keep
from sglang_inflight.frontend.frontend import HANDLERS, Frontend
from sglang_inflight.frontend.handlers import Arrival, Handler, Handlers
from sglang_inflight.frontend.pauses import Pauses
from sglang_inflight.frontend.updates.groups import Groups
from sglang_inflight.frontend.updates.updates import Updates
from sglang_inflight.frontend.updates.wanted import source_of
from sglang_inflight.messages import PauseMode
from sglang_inflight.settings import Settings, read
from sglang_inflight.vocabulary.answers import (
    Begun,
    Capabilities,
    Deferred,
    Grant,
    MemoryMoved,
    NamelessGrant,
    Receipt,
    Release,
    StagedSoFar,
    WindowGrant,
    WindowRelease,
)
from sglang_inflight.vocabulary.bodies import (
    AbortUpdateBody,
    BeginBody,
    Body,
    ContinueBody,
    DiskBody,
    EndBody,
    NameBody,
    PauseBody,
    ReleaseMemoryBody,
    SealBody,
    UpdateBody,
)
from sglang_inflight.vocabulary.errors import (
    Conflict,
    Dropped,
    InflightError,
    Refused,
    UnknownLayout,
)
from sglang_inflight.vocabulary.kept_kv import FENCE, RECOMPUTE, KVPolicy, choose_kept_kv

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

logger = logging.getLogger(__name__)

# ordered by what they do to requests: of a window's modes the last one here counts
_MEANINGS: dict[PauseMode, str] = {
    "in_place": "running requests keep their KV at the commit",
    "retract": "running requests are recomputed from the commit on",
    "abort": "running requests end at the commit with what they have",
}


# the open window at the arrival of a call's first byte
_sent_in: ContextVar[Window | None] = ContextVar("_sent_in")


@dataclass
class Window:
    """The time between a client's ``pause_generation`` and its ``continue_generation``."""

    mode: PauseMode
    # begun with the first piece
    session_id: str | None = None
    beginning: SharedCall[str] = field(default_factory=SharedCall)
    # the client's begin_weight_update, and that of the window's session
    asked: BeginBody = field(default_factory=BeginBody)
    begun: BeginBody | None = None
    # fields of the call that ends the session
    weight_version: str | None = None
    # the policy that its calls ask for: ``kv_cache``, or ``kv_max_age``
    kv_cache: KVPolicy | None = None
    kv_max_age: int | None = None
    torch_empty_cache: bool = False
    expected_digest: str | None = None
    # why the session was dropped
    failure: InflightError | None = None
    # id of the real pause, if the window became one
    pause_id: str | None = None
    pausing: SharedCall[None] = field(default_factory=SharedCall)
    grace: asyncio.TimerHandle | None = None
    # pieces arriving or being staged; the event is set when one is answered
    pieces: list[Arrival] = field(default_factory=list)
    one_is_in: asyncio.Event = field(default_factory=asyncio.Event)
    # set from continue_generation on
    ending: asyncio.Future[WindowRelease] | None = None
    # end of the previous window, whose session may still be open
    before: asyncio.Future[WindowRelease] | None = None

    def require_whole(self) -> None:
        """Raise ``Dropped`` if a piece is missing."""
        if self.failure is not None:
            raise _dropped(self.failure)

    def fail(self, why: InflightError) -> None:
        """Record a failure. The first one counts: later ones follow from it."""
        self.failure = self.failure or why

    def ask(self, body: BeginBody) -> None:
        """Note how the session is to be begun. Raises ``Conflict`` if it is begun differently."""
        nothing = BeginBody()
        begun = self.begun
        if begun is None:
            self.asked = body
            return
        differ = [
            name
            for name in ("selector", "partial", "on_busy", "lease_s", "received_digest")
            if getattr(body, name) not in (getattr(nothing, name), getattr(begun, name))
        ]
        if differ:
            raise Conflict(
                f"the window's session has begun without this {' and '.join(differ)}: call "
                "begin_weight_update before the first piece"
            )

    def ask_to_keep(self, body: UpdateBody | EndBody) -> None:
        """Note the policy of ``body`` for the commit, if it has one. The last one counts."""
        if isinstance(body, EndBody) and body.flush_cache is not None:
            self.kv_cache, self.kv_max_age = "recompute" if body.flush_cache else "fence", None
        if body.kv_cache is not None or body.kv_max_age is not None:
            # refused here if both are given
            choose_kept_kv(body.kv_cache, body.kv_max_age, flush_cache=False)
            self.kv_cache, self.kv_max_age = body.kv_cache, body.kv_max_age

    @contextmanager
    def counted(self, piece: Arrival) -> Iterator[None]:
        """Count a piece for the time of the block. The window's end waits for all pieces."""
        self.pieces.append(piece)
        try:
            yield
        finally:
            # compare by identity, because Arrivals compare equal
            self.pieces = [other for other in self.pieces if other is not piece]
            self.one_is_in.set()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Fail the window if the block raises or is cancelled."""
        try:
            yield
        except UnknownLayout:
            # the piece comes again, and its session waits for it
            raise
        except InflightError as error:
            self.fail(error)
            raise
        except asyncio.CancelledError:
            self.fail(Dropped("a caller has left before its answer"))
            raise
        except BaseException as error:
            self.fail(Dropped(f"a call of the window failed: {error!r}"))
            raise

    async def until_all_are_in(self, timeout_s: float) -> None:
        """Wait for all pieces; fail the window on a timeout, or on a body not fully arrived.

        The sender of a partly arrived body may be gone.
        """
        if not all(piece.is_whole for piece in self.pieces):
            self.fail(Dropped("continue_generation came before a piece had arrived whole"))
        try:
            async with asyncio.timeout(timeout_s):
                while self.failure is None and self.pieces:
                    self.one_is_in.clear()
                    await self.one_is_in.wait()
        except TimeoutError:
            self.fail(Dropped(f"a piece was not staged after {timeout_s:g} s"))

    def end_grace(self) -> None:
        if self.grace is not None:
            self.grace.cancel()


@HANDLERS.join(order=1)
def become_transparent(
    frontend: Frontend, tokenizer_manager: TokenizerManager, handlers: Handlers
) -> Handlers:
    return Transparent(
        handlers,
        tokenizer_manager,
        frontend.pauses,
        frontend.updates,
        frontend.groups,
        frontend.settings,
        frontend.can,
        grace_s=read(TransparentSettings).transparent_grace_s,
        in_background=frontend.in_background,
    ).handlers


class Transparent:
    """Handlers of transparent mode. At most one window is open. Lives on the front end's loop.

    Every change of the window happens between two awaits. ``resume`` closes the window before it
    ends the session, in a task independent of the caller. A piece belongs to the window open at
    the arrival of its first byte, and counts there until it is answered. So a window ends with
    all of its pieces, even if a new window opens meanwhile.
    """

    def __init__(
        self,
        direct: Handlers,
        tokenizer_manager: TokenizerManager,
        pauses: Pauses,
        updates: Updates,
        groups: Groups,
        settings: Settings,
        can: Capabilities,
        *,
        grace_s: float,
        in_background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """``in_background`` runs a coroutine without a waiting caller, and logs its failure.

        ``grace_s``: seconds without an update after which a window becomes a real pause.
        """
        self._direct = direct
        self._tokenizer_manager = tokenizer_manager
        self._pauses = pauses
        self._updates = updates
        self._groups = groups
        self._can = can
        self._settings = settings
        self._grace_s = grace_s
        self._in_background = in_background
        self._tasks = tokenizer_manager.asyncio_tasks
        self._window: Window | None = None
        self._releasing = asyncio.Lock()
        # kept until the next pause, or until its failure was delivered
        self._ended: Window | None = None

    @property
    def handlers(self) -> Handlers:
        """The direct handlers, and in place of some of them those of this object."""
        ours: dict[str, Handler] = {
            "pause_generation": self.pause,
            "continue_generation": self.resume,
            "update_weights_from_disk": self.update,
            "update_weights_from_tensor": self.update,
            "update_weights_from_distributed": self.update,
            "update_weights_from_ipc": self.update,
            "begin_weight_update": self.begin,
            "seal_weight_update": self.seal,
            "end_weight_update": self.end,
            "abort_weight_update": self.abort,
            "update_weight_version": self.rename,
            "release_memory_occupation": self.release_memory,
            "is_paused": self.is_paused,
        }
        return Handlers({**self._direct.by_name, **ours}, self.piece, self._skips_flush)

    async def pause(self, body: PauseBody) -> Grant | NamelessGrant | WindowGrant:
        before, self._ended = self._ended, None
        mode = body.mode or "abort"
        if mode not in _MEANINGS or body != PauseBody(mode=body.mode):
            return await self._direct["pause_generation"](body)
        window = self._window
        if window is not None and (window.session_id is not None or window.pieces):
            await self._forget(window)
            window = None
        if window is None:
            window = self._window = Window(mode, before=before.ending if before else None)
            self._start_grace(window, self._grace_s)
        else:
            # AReaL pauses with abort, and then in_place to hold what it has emptied
            window.mode = max(window.mode, mode, key=list(_MEANINGS).index)
        mode = window.mode
        return WindowGrant(
            message=(
                "Generation continues (SGLANG_INFLIGHT_TRANSPARENT): weights sent now go live at "
                f"continue_generation, and {_MEANINGS[mode]}."
            ),
            paused=window.pause_id is not None,
            mode=mode,
            weight_version=self._tokenizer_manager.config_value("weight_version"),
        )

    async def resume(self, body: ContinueBody) -> Release | WindowRelease:
        window = self._window or self._ended
        if window is None or body.pause_id is not None:
            return await self._pauses.resume(body)
        try:
            return await self._await_end(window, body)
        except InflightError:
            # delivered: the next continue_generation may be another client's
            if self._ended is window:
                self._ended = None
            raise

    async def _await_end(self, window: Window, body: ContinueBody) -> WindowRelease:
        if window.ending is None:
            self._window, self._ended = None, window
            window.end_grace()
            window.ending = keep(self._tasks, self._end(window, body))
        elif window.ending.done():
            # a pause of another caller may have been taken since
            resumed = await self._go_on(body, window)
            release = window.ending.result()
            return msgspec.structs.replace(release, message=resumed.message, paused=resumed.paused)
        return await asyncio.shield(window.ending)

    async def _end(self, window: Window, body: ContinueBody) -> WindowRelease:
        try:
            await window.until_all_are_in(self._settings.update_timeout_s)
            receipt = await self._end_window(window)
        finally:
            # generation continues, also after a failed update
            resumed = await self._go_on(body, window)
        return WindowRelease(message=resumed.message, paused=resumed.paused, receipt=receipt)

    async def is_paused(self, _: Body) -> bool:
        """Return true within a window: its client has asked for a pause, and expects one."""
        return self._window is not None or await self._pauses.is_paused()

    async def update(self, body: UpdateBody) -> Receipt | StagedSoFar:
        window = _sent_in.get(self._window)
        if window is None or body.session_id not in (None, window.session_id):
            return await self._updates.update(body)
        with window.counted(Arrival(is_whole=True)), window.failing():
            session_id = await self._join(window, body)
            window.ask_to_keep(body)
            piece = msgspec.structs.replace(
                body,
                session_id=session_id,
                non_blocking=True,
                # decided at the commit, by the window's mode
                flush_cache=False,
                kv_cache=None,
                kv_max_age=None,
                abort_all_requests=body.abort_all_requests or window.mode == "abort",
                # both were for the session's begin
                on_busy="wait",
                expected_version=None,
            )
            return await self._updates.update(piece)

    @contextmanager
    def piece(self) -> Iterator[Arrival]:
        window = self._window
        token = _sent_in.set(window)
        try:
            with self._direct.piece() as arrival:
                try:
                    with window.counted(arrival) if window is not None else nullcontext():
                        yield arrival
                except BaseException as error:
                    if window is not None and not arrival.is_whole:
                        why = error if isinstance(error, InflightError) else None
                        window.fail(why or Dropped("a piece has not arrived whole"))
                    raise
        finally:
            _sent_in.reset(token)

    async def begin(self, body: BeginBody) -> Begun | Deferred:
        window = self._window
        if window is None or body.session_id is not None or body.non_blocking:
            return await self._updates.begin(body)
        with window.counted(Arrival(is_whole=True)), window.failing():
            window.require_whole()
            if body.new_id is not None:
                raise Refused(
                    "new_id names a session of its own, and this one is the window's "
                    "(SGLANG_INFLIGHT_TRANSPARENT): leave it out, or pass non_blocking=true"
                )
            window.ask(body)
            if body.expected_version is not None:
                await window.beginning.join(lambda: self._begin(window, body.partial))
                self._require_base(window, body.expected_version)
        # a client may take long between begin and its first piece
        self._start_grace(window, self._settings.update_timeout_s)
        return Deferred(message="The pieces go live at continue_generation.")

    async def seal(self, body: SealBody) -> StagedSoFar:
        if self._window is not None and body.session_id is None:
            body = msgspec.structs.replace(body, session_id=self._window.session_id)
        return await self._updates.seal(body)

    async def end(self, body: EndBody) -> Receipt | Deferred:
        window = self._window
        if window is None or body.session_id is not None or body.non_blocking:
            return await self._updates.end(body)
        window.require_whole()
        window.weight_version = body.weight_version or window.weight_version
        window.expected_digest = body.expected_digest or window.expected_digest
        window.torch_empty_cache |= body.torch_empty_cache
        window.ask_to_keep(body)
        return Deferred(message="The session goes live at continue_generation.")

    async def abort(self, body: AbortUpdateBody) -> None:
        window = self._window
        await self._updates.abort(body)
        if window is not None and body.session_id in (None, window.session_id):
            window.fail(Dropped("a caller aborted the session"))

    async def rename(self, body: NameBody) -> dict[str, Any]:
        if self._window is None:
            return await self._updates.rename(body)
        self._window.weight_version = body.new_version
        return {
            "success": True,
            "message": f"The weights will go live as {body.new_version}.",
            "new_version": body.new_version,
        }

    def _skips_flush(self) -> bool:
        return self._window is not None and self._window.pause_id is None

    async def release_memory(self, body: ReleaseMemoryBody) -> MemoryMoved:
        release = self._direct["release_memory_occupation"]
        window = self._window
        if window is None:
            return await release(body)
        async with self._releasing:
            was_paused = window.pause_id is not None
            await self._pause_really(window)
            try:
                return await release(body)
            except Refused:
                # all memory is there, and this window's generation goes on
                if not was_paused:
                    await asyncio.shield(self._end_pause(window))
                raise

    # ---- the window ------------------------------------------------------------------

    async def _join(self, window: Window, body: UpdateBody) -> str:
        """Return the id of the window's session; the first piece begins it.

        On failure the group is marked broken: its trainer may have begun to broadcast already.
        """
        async with self._groups.mark_broken_on_failure(source_of(body)):
            window.require_whole()
            session_id = await window.beginning.join(lambda: self._begin_with(window, body))
            self._require_base(window, body.expected_version)
            if body.partial not in (None, self._is_partial(window)):
                raise Conflict(
                    f"partial is {body.partial}, and the window's session has begun with another"
                )
            return session_id

    async def _begin_with(self, window: Window, first: UpdateBody) -> str:
        asked, nothing = window.asked, BeginBody()
        if isinstance(first, DiskBody) and asked.selector == nothing.selector:
            asked = msgspec.structs.replace(asked, selector=first.selector)
        if asked.on_busy == nothing.on_busy:
            asked = msgspec.structs.replace(asked, on_busy=first.on_busy)
        window.asked = msgspec.structs.replace(asked, expected_version=first.expected_version)
        partial = first.partial if first.sends_pieces else first.is_partial
        return await self._begin(window, partial if asked.partial is None else asked.partial)

    async def _begin(self, window: Window, partial: bool | None) -> str:
        """Begin the session; None leaves ``partial`` to ``SGLANG_INFLIGHT_SESSIONS``."""
        window.end_grace()
        if window.before is not None:
            await asyncio.wait({window.before})
        window.begun = msgspec.structs.replace(
            window.asked,
            non_blocking=True,
            partial=partial,
            lease_s=window.asked.lease_s or self._settings.update_timeout_s,
        )
        begun = await self._updates.begin(window.begun)
        window.session_id = begun.session_id
        if window.failure is not None:
            # No other code ends this session: a concurrent piece failed, or a new window replaced
            # this one.
            await self._drop_session(window)
            window.require_whole()
        return begun.session_id

    def _require_base(self, window: Window, expected: str | None) -> None:
        """Raise ``Conflict`` unless the window's session is staged over version ``expected``.

        The ranks have compared the version of the session's begin. The session has the turn since
        then, so no other update has changed the served version.
        """
        served = self._tokenizer_manager.config_value("weight_version")
        begun = window.begun.expected_version if window.begun is not None else None
        if expected not in (None, begun, served):
            raise Conflict(f"expected_version is {expected!r}, but {served!r} is serving")

    def _is_partial(self, window: Window) -> bool:
        """Return whether the window's session, which has begun, is partial."""
        partial = window.begun.partial if window.begun is not None else None
        return self._settings.sessions != "whole" if partial is None else partial

    async def _go_on(self, body: ContinueBody, window: Window) -> Release:
        try:
            return await self._pauses.resume(body)
        except Conflict as error:
            # memory is released: generation continues when it is resumed
            if window.pause_id is not None:
                await self._pauses.resume(ContinueBody(pause_id=window.pause_id))
            return Release(message=str(error), paused=True)

    async def _end_window(self, window: Window) -> Receipt | None:
        """Commit, and return the receipt; None if no weights were sent."""
        if window.failure is not None:
            await self._drop_session(window)
        window.require_whole()
        if window.session_id is None:
            if window.expected_digest is not None:
                raise Refused("expected_digest cannot be compared: no weights were sent")
            if window.weight_version is not None:
                await self._updates.rename(
                    NameBody(new_version=window.weight_version, abort_all_requests=False)
                )
            return None
        try:
            return await self._updates.end(
                EndBody(
                    session_id=window.session_id,
                    non_blocking=True,
                    weight_version=window.weight_version,
                    **self._policy_of(window),
                    torch_empty_cache=window.torch_empty_cache,
                    expected_digest=window.expected_digest,
                )
            )
        except Refused as error:
            raise _dropped(error) from error

    def _policy_of(self, window: Window) -> dict[str, Any]:
        """Return the fields of the policy asked for, of the setting, or of the window's mode."""
        if window.kv_cache is not None or window.kv_max_age is not None:
            return {"kv_cache": window.kv_cache, "kv_max_age": window.kv_max_age}
        retracts = window.mode == "retract"
        kept = as_sglang_does(RECOMPUTE if retracts else FENCE, self._can)
        name: KVPolicy = "recompute" if retracts else "fence"
        return self._updates.policy_or("keep" if kept.keeps_all else name)

    async def _forget(self, window: Window) -> None:
        """Drop a window's weights when another trainer pauses: the first has died or given up."""
        logger.warning(
            "pause_generation came while an earlier pause's weights were staged: dropping them."
        )
        self._window = None
        window.end_grace()
        window.fail(Dropped("another pause_generation came before its continue_generation"))
        await self._drop_session(window)

    async def _drop_session(self, window: Window) -> None:
        if window.session_id is not None:
            # refused if the failed piece has dropped the session already
            with suppress(Refused):
                await self._updates.abort(AbortUpdateBody(session_id=window.session_id))

    def _start_grace(self, window: Window, seconds: float) -> None:
        window.end_grace()

        def pause() -> None:
            self._in_background(self._pause_really(window))

        loop = asyncio.get_running_loop()
        window.grace = loop.call_later(seconds, pause)

    async def _pause_really(self, window: Window) -> None:
        await window.pausing.join(lambda: self._take_pause(window))

    async def _end_pause(self, window: Window) -> None:
        """Release the window's real pause: the call that needed it was refused."""
        pause_id, window.pause_id, window.pausing = window.pause_id, None, SharedCall()
        await self._pauses.give_back(pause_id)
        if self._window is window:
            self._start_grace(window, self._grace_s)

    async def _take_pause(self, window: Window) -> None:
        if self._window is not window:
            return
        window.end_grace()
        grant = await self._pauses.pause(PauseBody(mode=window.mode))
        window.pause_id = grant.pause_id
        if self._window is not window:
            # continue_generation ended the window meanwhile: release its pause
            await self._pauses.resume(ContinueBody(pause_id=window.pause_id))


def _dropped(why: InflightError) -> Dropped:
    return Dropped(
        f"the update was dropped, and nothing has changed: {why}. Call continue_generation to end "
        "this window, or pause_generation to begin anew"
    )
