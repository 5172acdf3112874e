"""The end of an engine, and of everything that waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar

from sglang.srt.managers.io_struct import AbortReq

from sglang_inflight.errors import OutcomeUnknown, Refused

if TYPE_CHECKING:
    from sglang_inflight.frontend.upstream.tokenizer_manager import TokenizerManager

T = TypeVar("T")

_DOWN = "the engine was shut down"


class Lifetime:
    """Until ``Engine.shutdown``, which ends the ranks and leaves nobody to answer.

    ``end`` is called by any thread, all else runs on the event loop of the manager. So a
    call either begins after ``is_over`` is set, and is refused, or is in ``_ends`` (a
    request: in ``rid_to_state``) when ``_end_all`` comes to run on that loop.
    """

    def __init__(self, tokenizer_manager: TokenizerManager) -> None:
        self._tokenizer_manager = tokenizer_manager
        self.is_over = False
        # one for each call that waits
        self._ends: set[asyncio.Future[None]] = set()

    def require(self) -> None:
        """Raises ``Refused`` when it is over."""
        if self.is_over:
            raise Refused(_DOWN)

    async def attend(self, work: Awaitable[T]) -> T:
        """Await ``work``. Raises ``OutcomeUnknown`` when the engine is shut down meanwhile.

        Whoever cancels it waits until ``work`` has cleaned up.
        """
        task = asyncio.ensure_future(work)
        end = asyncio.get_running_loop().create_future()
        self._ends.add(end)
        try:
            self.require()
            await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.add_done_callback(_hear)
                raise OutcomeUnknown(f"{_DOWN} before this call had its answer")
            return task.result()
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
            raise
        finally:
            task.cancel()
            self._ends.discard(end)

    def end(self) -> None:
        """Refuse what comes, and end what waits."""
        self.is_over = True
        loop = self._tokenizer_manager.event_loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # closed: nobody waits
                loop.call_soon_threadsafe(self._end_all)

    def _end_all(self) -> None:
        for end in self._ends:
            if not end.done():
                end.set_result(None)
        reason = {"type": "abort", "message": _DOWN, "status_code": 503}
        for rid in list(self._tokenizer_manager.rid_to_state):
            # as of a request that the scheduler aborted
            self._tokenizer_manager._handle_abort_req(AbortReq(rid=rid, finished_reason=reason))


def _hear(finished: asyncio.Future[T]) -> None:
    """Nobody else will, and asyncio would complain."""
    if not finished.cancelled():
        finished.exception()
