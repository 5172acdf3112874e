"""Helpers of the front end's event loop.

A deadline, background tasks, calls shared by callers, and waits that end when a server or an engine
shuts down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sglang.srt.managers.io_struct import AbortReq

from sglang_inflight.hooking import BEFORE, TOKENIZER_MANAGER, hook, with_us
from sglang_inflight.vocabulary.errors import Gone, InflightError, OutcomeUnknown

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Deadline:
    """A time limit, ``seconds`` after construction. Each call of a session has its own."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds left, always above 0: a wait at the deadline still looks once."""
        return max(0.001, self._at - time.monotonic())

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._at


def keep(tasks: set[asyncio.Future[Any]], doing: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start ``doing`` and keep its task in ``tasks``: the event loop's reference is weak."""
    task = asyncio.ensure_future(doing)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def carry_through(tasks: set[asyncio.Future[Any]], doing: Coroutine[Any, Any, T]) -> T:
    """Return an irrevocable step's outcome. The caller's cancellation does not stop the step."""
    return await asyncio.shield(keep(tasks, doing))


async def _nothing() -> None:
    """Give nothing back: the work leaves nothing behind."""


class SharedCall(Generic[T]):
    """Work started by its first caller; every caller receives the outcome.

    The work runs in a task of its own, so a caller may be cancelled without cancelling the work.
    The outcome exists some ticks of the event loop before a caller receives it, and callers may
    be cancelled in these ticks. So when the last caller is cancelled and no caller has received
    the outcome, the work is cancelled and its effect given back. A later caller waits for the
    end of ``give_back``, then starts the work anew.

    Lives on one event loop. Nothing else runs between two awaits, so at each tick a caller
    either waits or has received the outcome, and the count needs no lock.
    """

    def __init__(self) -> None:
        self._doing: asyncio.Future[T] | None = None
        self._give_back: Callable[[], Awaitable[None]] = _nothing
        # gives back the previous work, abandoned by all its callers
        self._given_up: asyncio.Future[None] | None = None
        self._waiting = 0
        self._is_received = False

    @property
    def is_over(self) -> bool:
        """Whether no caller waits, and no giving back is running."""
        return not self._waiting and (self._given_up is None or self._given_up.done())

    async def join(
        self,
        start: Callable[[], Awaitable[T]],
        give_back: Callable[[], Awaitable[None]] = _nothing,
    ) -> T:
        """Return the work's outcome; start the work if no other caller has.

        Only the first caller's ``start`` and ``give_back`` are called. ``give_back`` runs after
        work that is done, was cancelled halfway, or was cancelled before its start. Failed work
        cleans up by itself.
        """
        self._waiting += 1
        try:
            while self._given_up is not None and not self._given_up.done():
                await asyncio.wait({self._given_up})
            if self._doing is None:
                self._doing = asyncio.ensure_future(start())
                self._give_back, self._is_received = give_back, False
            outcome = await asyncio.shield(self._doing)
            self._is_received = True
            return outcome
        finally:
            self._waiting -= 1
            if not self._waiting and not self._is_received and not _has_failed(self._doing):
                await self._give_up()

    async def _give_up(self) -> None:
        doing, self._doing = self._doing, None
        if doing is None:
            return
        given_up = self._given_up = asyncio.ensure_future(_undo(doing, self._give_back))
        while not given_up.done():
            # a second cancellation of the same caller must not stop the giving back
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({given_up})


async def _undo(doing: asyncio.Future[T], give_back: Callable[[], Awaitable[None]]) -> None:
    doing.cancel()
    await asyncio.wait({doing})
    if _has_failed(doing):
        return
    try:
        await give_back()
    except InflightError as error:
        logger.warning("The effect of an abandoned call could not be given back: %s", error)


def _has_failed(doing: asyncio.Future[T] | None) -> bool:
    return (
        doing is not None
        and doing.done()
        and not doing.cancelled()
        and doing.exception() is not None
    )


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

    @hook(f"{TOKENIZER_MANAGER}._init_req_state", BEFORE, via="inflight.lifetime", when=with_us)
    def require(self, *_: Any) -> None:
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
