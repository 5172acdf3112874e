"""Clients that pause, send weights and continue: for them nothing stops.

    call                          what it does here
    pause_generation              opens a *window*, and is granted at once
    flush_cache                   answers that it is done: the commit sees to the cache
    an update, by any route       is staged into the window's session, which the first begins
    begin, end_weight_update      succeed, and begin and end nothing
    update_weight_version         names the version of the commit
    continue_generation           seals, votes and commits; its answer is how that went

What happens to running requests at the commit is what the pause's mode stands for: ``retract``
recomputes their KV, ``in_place`` keeps it (and fences it off from later requests), ``abort``
ends them with what they have.

A pause is a real one from the moment that shows it: where memory is to be released, or where
nothing is sent for a while. A pause of a caller who knows this server, and so gives a lease or
an id, is real from the beginning.

A piece that fails drops the session. The caller hears it, and again as the answer of
``continue_generation``, because there are clients that read no other. Nothing has changed then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from sglang.srt.managers.io_struct import FlushCacheReqOutput

from sglang_inflight.errors import Conflict, Dropped, InflightError, Refused
from sglang_inflight.frontend.bodies import (
    AbortUpdateBody,
    BeginBody,
    ContinueBody,
    DiskBody,
    EndBody,
    NameBody,
    PauseBody,
    ReleaseMemoryBody,
    SealBody,
    UpdateBody,
)
from sglang_inflight.frontend.calls import Calls
from sglang_inflight.frontend.memory import Memory
from sglang_inflight.frontend.pauses import Pauses
from sglang_inflight.frontend.shared_call import SharedCall
from sglang_inflight.frontend.tiers import why_out_of_reach
from sglang_inflight.frontend.updates.groups import Groups
from sglang_inflight.frontend.updates.updates import Updates
from sglang_inflight.grants import (
    Deferred,
    Grant,
    MemoryMoved,
    NamelessGrant,
    Release,
    WindowGrant,
    WindowRelease,
)
from sglang_inflight.messages import KVPolicy, PauseMode
from sglang_inflight.receipt import Begun, Receipt, StagedSoFar
from sglang_inflight.settings import Settings

if TYPE_CHECKING:
    from sglang_inflight.frontend.upstream.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MEANINGS: dict[PauseMode, str] = {
    "abort": "running requests end at the commit with what they have",
    "in_place": "running requests keep their KV at the commit",
    "retract": "running requests are recomputed from the commit on",
}


@dataclass
class Window:
    """The time between a client's ``pause_generation`` and its ``continue_generation``."""

    mode: PauseMode
    # begun with the first piece
    session_id: str | None = None
    beginning: SharedCall[str] = field(default_factory=SharedCall)
    weight_version: str | None = None
    # why its session was dropped
    failure: InflightError | None = None
    # of the real pause, where there had to be one
    pause_id: str | None = None
    pausing: SharedCall[None] = field(default_factory=SharedCall)
    grace: asyncio.TimerHandle | None = None

    @property
    def kv_policy(self) -> KVPolicy:
        if self.mode == "retract":
            return "recompute"
        # what cannot be fenced off SGLang's own pause keeps, too
        return "keep" if why_out_of_reach() else "fence"

    def require_whole(self) -> None:
        """Raises ``Dropped`` where a piece is missing."""
        if self.failure is not None:
            raise _dropped(self.failure)

    def fail(self, why: InflightError) -> None:
        """What fails after the first failure fails because of it."""
        self.failure = self.failure or why

    def end_grace(self) -> None:
        if self.grace is not None:
            self.grace.cancel()


class TransparentCalls(Calls):
    """At most one window is open. Lives on the front end's event loop.

    What changes the window does so between two awaits: ``resume`` takes it away before it ends
    the session, so a second call of it, or a piece that comes late, finds none.
    """

    def __init__(
        self,
        tokenizer_manager: TokenizerManager,
        pauses: Pauses,
        updates: Updates,
        memory: Memory,
        groups: Groups,
        settings: Settings,
        *,
        in_background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """``in_background`` does what nobody waits for, and logs what comes of it."""
        super().__init__(tokenizer_manager, pauses, updates, memory)
        self._groups = groups
        self._settings = settings
        self._in_background = in_background
        self._window: Window | None = None

    async def pause(self, body: PauseBody) -> Grant | NamelessGrant | WindowGrant:
        mode = body.mode or "abort"
        if mode not in _MEANINGS or body != PauseBody(mode=body.mode):
            return await super().pause(body)
        window = self._window
        if window is not None and window.session_id is not None:
            await self._forget(window)
            window = None
        if window is None:
            window = self._window = Window(mode)
            self._start_grace(window)
        else:
            window.mode = mode
        return WindowGrant(
            message=(
                "Generation goes on (SGLANG_INFLIGHT_TRANSPARENT): the weights that are sent now "
                f"go live at continue_generation, and {_MEANINGS[mode]}."
            ),
            paused=window.pause_id is not None,
            mode=mode,
            weight_version=self._tokenizer_manager.config_value("weight_version"),
        )

    async def resume(self, body: ContinueBody) -> Release | WindowRelease:
        window = self._window
        if window is None or body.pause_id is not None:
            return await super().resume(body)
        self._window = None
        window.end_grace()
        try:
            receipt = await self._end_window(window)
        finally:
            # whatever became of the update, generation goes on
            resumed = await asyncio.shield(asyncio.ensure_future(self._go_on(body, window)))
        return WindowRelease(message=resumed.message, paused=resumed.paused, receipt=receipt)

    async def is_paused(self) -> bool:
        """What the client of a window has asked for, and takes for granted."""
        return self._window is not None or await super().is_paused()

    async def update(self, body: UpdateBody) -> Receipt | StagedSoFar:
        window = self._window
        if window is None or body.session_id not in (None, window.session_id):
            return await super().update(body)
        try:
            session_id = await self._join(window, body)
            piece = msgspec.structs.replace(
                body,
                session_id=session_id,
                non_blocking=True,
                # the commit's, which the window's mode decides
                flush_cache=False,
                kv_cache=None,
                abort_all_requests=window.mode == "abort",
                on_busy="wait",
                expected_version=None,
            )
            return await super().update(piece)
        except InflightError as error:
            window.fail(error)
            raise
        except asyncio.CancelledError:
            window.fail(Dropped("a piece's caller has left before its answer"))
            raise

    @contextmanager
    def piece(self) -> Iterator[None]:
        # the one that it was sent in: by the time that it fails another one may be open
        window = self._window
        try:
            yield
        except BaseException as error:
            if window is not None:
                why = error if isinstance(error, InflightError) else None
                window.fail(why or Dropped("a piece has not arrived whole"))
            raise

    async def begin(self, body: BeginBody) -> Begun | Deferred:
        window = self._window
        if window is None or body.session_id is not None or body.non_blocking:
            return await super().begin(body)
        window.require_whole()
        window.end_grace()
        return Deferred(message="The pieces go live at continue_generation.")

    async def seal(self, body: SealBody) -> StagedSoFar:
        if self._window is not None and body.session_id is None:
            body = SealBody(session_id=self._window.session_id)
        return await super().seal(body)

    async def end(self, body: EndBody) -> Receipt | Deferred:
        window = self._window
        if window is None or body.session_id is not None or body.non_blocking:
            return await super().end(body)
        window.require_whole()
        window.weight_version = body.weight_version or window.weight_version
        return Deferred(message="It goes live at continue_generation.")

    async def abort(self, body: AbortUpdateBody) -> None:
        window = self._window
        await super().abort(body)
        if window is not None and body.session_id in (None, window.session_id):
            window.fail(Dropped("it was aborted by a caller"))

    async def rename(self, body: NameBody) -> dict[str, Any]:
        if self._window is None:
            return await super().rename(body)
        self._window.weight_version = body.new_version
        return {
            "success": True,
            "message": f"The weights that go live are {body.new_version}",
            "new_version": body.new_version,
        }

    async def flush(self, flush: Callable[[], Awaitable[T]]) -> T:
        if self._window is None or self._window.pause_id is not None:
            return await flush()
        return cast(T, FlushCacheReqOutput(success=True))

    async def release_memory(self, body: ReleaseMemoryBody) -> MemoryMoved:
        if self._window is not None:
            await self._pause_really(self._window)
        return await super().release_memory(body)

    # ---- the window ------------------------------------------------------------------

    async def _join(self, window: Window, body: UpdateBody) -> str:
        """The id of the window's session.

        Where there is none to be had, the trainer may have begun to broadcast all the same.
        """
        async with self._groups.in_step(body.source):
            window.require_whole()
            return await window.beginning.join(lambda: self._begin(window, body))

    async def _begin(self, window: Window, first: UpdateBody) -> str:
        window.end_grace()
        begun = await super().begin(
            BeginBody(
                selector=first.selector if isinstance(first, DiskBody) else "all",
                non_blocking=True,
                partial=first.is_partial,
                expected_version=first.expected_version,
                lease_s=self._settings.update_timeout_s,
            )
        )
        assert isinstance(begun, Begun)
        window.session_id = begun.session_id
        return begun.session_id

    async def _go_on(self, body: ContinueBody, window: Window) -> Release:
        try:
            resumed = await super().resume(body)
            assert isinstance(resumed, Release)
            return resumed
        except Conflict as error:
            # memory is away: its return lets generation go on
            if window.pause_id is not None:
                await self._pauses.resume(ContinueBody(pause_id=window.pause_id))
            return Release(message=str(error), paused=True)

    async def _end_window(self, window: Window) -> Receipt | None:
        """The receipt; None where no weights were sent."""
        if window.failure is not None:
            await self._drop_session(window)
        window.require_whole()
        if window.session_id is None:
            if window.weight_version is not None:
                await super().rename(
                    NameBody(new_version=window.weight_version, abort_all_requests=False)
                )
            return None
        try:
            receipt = await super().end(
                EndBody(
                    session_id=window.session_id,
                    non_blocking=True,
                    weight_version=window.weight_version,
                    kv_cache=window.kv_policy,
                )
            )
        except Refused as error:
            raise _dropped(error) from error
        assert isinstance(receipt, Receipt)
        return receipt

    async def _forget(self, window: Window) -> None:
        """Another trainer begins anew: the one before has died, or has given up."""
        logger.warning("A pause came while another one's weights were staged: they are dropped.")
        self._window = None
        window.end_grace()
        await self._drop_session(window)

    async def _drop_session(self, window: Window) -> None:
        if window.session_id is not None:
            # where it was not dropped with the piece that failed
            with suppress(Refused):
                await super().abort(AbortUpdateBody(session_id=window.session_id))

    def _start_grace(self, window: Window) -> None:
        def pause() -> None:
            self._in_background(self._pause_really(window))

        loop = asyncio.get_running_loop()
        window.grace = loop.call_later(self._settings.transparent_grace_s, pause)

    async def _pause_really(self, window: Window) -> None:
        await window.pausing.join(lambda: self._take_pause(window))

    async def _take_pause(self, window: Window) -> None:
        if self._window is not window:
            return
        window.end_grace()
        grant = await self._pauses.pause(PauseBody(mode=window.mode))
        window.pause_id = grant.pause_id
        if self._window is not window:
            # continued meanwhile
            await self._pauses.resume(ContinueBody(pause_id=window.pause_id))


def _dropped(why: InflightError) -> Dropped:
    return Dropped(f"the update was dropped, and nothing has changed: {why}")
