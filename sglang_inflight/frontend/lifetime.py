"""End every wait for ranks when a server or an engine shuts down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from sglang.srt.managers.io_struct import AbortReq

from sglang_inflight.vocabulary.errors import Gone, OutcomeUnknown

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

T = TypeVar("T")


class Lifetime:
    """Lifetime of the ranks: up to ``Engine.shutdown``, or SIGTERM and the last request's end.

    ``end`` may be called by any thread; all else runs on the manager's event loop. So a call
    either begins after ``_why_over`` is set, and is refused, or is in ``_ends`` (a request: in
    ``rid_to_state``) when ``_end_all`` runs on that loop.
    """

    def __init__(self, tokenizer_manager: TokenizerManager) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._why_over: str | None = None
        # one for each waiting call
        self._ends: set[asyncio.Future[None]] = set()

    def require(self) -> None:
        """Raise ``Gone`` after ``end``."""
        if self._why_over is not None:
            raise Gone(self._why_over)

    async def unless_shut_down(self, work: Awaitable[T]) -> T:
        """Await ``work``. Raises ``OutcomeUnknown`` if ``end`` is called meanwhile.

        A cancellation waits until ``work`` has cleaned up.
        """
        task = asyncio.ensure_future(work)
        end = asyncio.get_running_loop().create_future()
        self._ends.add(end)
        try:
            self.require()
            await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
            # At shutdown SGLang cancels futures that ``work`` may wait for: not an answer.
            if end.done() and not _has_succeeded(task):
                task.add_done_callback(_retrieve_error)
                raise OutcomeUnknown(f"{self._why_over} before this call had its answer")
            return task.result()
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
            raise
        finally:
            task.cancel()
            self._ends.discard(end)

    def end(self, why: str) -> None:
        """Refuse new calls and end waiting ones. ``why`` is the beginning of a sentence."""
        self._why_over = why
        loop = self._tokenizer_manager.event_loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no call waits
                loop.call_soon_threadsafe(self._end_all, why)

    def _end_all(self, why: str) -> None:
        for end in self._ends:
            if not end.done():
                end.set_result(None)
        reason: Any = {"type": "abort", "message": why, "status_code": Gone.status}
        for rid in list(self._tokenizer_manager.rid_to_state):
            # in the form of an abort by the scheduler
            self._tokenizer_manager._handle_abort_req(AbortReq(rid=rid, finished_reason=reason))


def _has_succeeded(task: asyncio.Future[T]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _retrieve_error(finished: asyncio.Future[T]) -> None:
    """Retrieve the exception: asyncio logs exceptions never retrieved."""
    if not finished.cancelled():
        finished.exception()
