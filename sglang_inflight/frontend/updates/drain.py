"""What an update that blocks waits for: that no request runs.

That is SGLang's own meaning of an update: it waits until running requests have ended, keeps
new ones back meanwhile, and acts at once where somebody has paused generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from sglang_inflight.errors import Conflict, Refused
from sglang_inflight.frontend.deadline import Deadline
from sglang_inflight.frontend.pauses import Pauses
from sglang_inflight.frontend.updates.open_update import OpenUpdate
from sglang_inflight.sglang_types.runtime_context import get_disagg, get_serving
from sglang_inflight.unsupported import why_no_pause

if TYPE_CHECKING:
    from sglang_inflight.frontend.sglang_types.lora_registry import RWLock
    from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager

# How often a call that waits for running requests looks whether somebody paused them.
LOOK_S = 0.05


def _why_no_pause_of_its_own() -> str | None:
    if get_disagg().disaggregation_mode == "decode":
        # and a pause would leave it here, so that not all could be made anew
        return "KV comes in from the prefill server meanwhile (--disaggregation-mode decode)"
    return why_no_pause()


class NoRequestsRunning:
    """Holds requests back for the time of a block. Lives on the front end's event loop.

    It is asked for by who has the turn of the updates, and by nobody else. So nothing that
    an update waits for can wait for an update that comes after it, and requests are held
    back for the update that goes on, never for one that waits.
    """

    def __init__(self, tokenizer_manager: TokenizerManager, pauses: Pauses) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._pauses = pauses

    @asynccontextmanager
    async def held(self, update_id: str, deadline: Deadline) -> AsyncIterator[None]:
        """No request runs in the block, unless somebody continues generation meanwhile.

        Raises ``Conflict`` where requests still run when ``deadline`` is over.
        """
        if (reason := _why_no_pause_of_its_own()) is None:
            block = self._pauses.held_while_nothing_runs(f"update-{update_id}", deadline)
        elif get_serving().tokenizer_worker_num > 1:
            raise Refused(
                "with --tokenizer-worker-num above 1 an update waits for running requests as a "
                f"pause does: {reason}; pass non_blocking=true"
            )
        else:
            block = self._locked(deadline)
        async with block:
            yield

    async def enter(self, stack: AsyncExitStack, update: OpenUpdate, deadline: Deadline) -> None:
        """``held`` until ``stack`` is closed. Raises ``Dropped`` where the update is, meanwhile."""
        waiting = asyncio.ensure_future(stack.enter_async_context(self.held(update.id, deadline)))
        over = asyncio.ensure_future(update.over.wait())
        try:
            await asyncio.wait({waiting, over}, return_when=asyncio.FIRST_COMPLETED)
            update.require_alive()
            await waiting
        finally:
            for task in (waiting, over):
                task.cancel()
            await asyncio.wait({waiting, over})

    @asynccontextmanager
    async def _locked(self, deadline: Deadline) -> AsyncIterator[None]:
        """By upstream's lock of requests and updates, on servers where no pause does it.

        The lock is either never taken or given back, wherever a cancellation comes: taking
        it is a task of its own, which is over before this is. In a pause it is not asked for:
        the server's queue keeps the requests that come.
        """
        if self._tokenizer_manager.is_pause:
            yield
            return
        lock = self._tokenizer_manager.model_update_lock
        acquiring = asyncio.ensure_future(lock.acquire_writer())
        try:
            while not acquiring.done() and not self._tokenizer_manager.is_pause:
                if deadline.is_over:
                    raise Conflict("requests still ran when the update's time was over")
                await asyncio.wait({acquiring}, timeout=LOOK_S)
            yield
        finally:
            acquiring.cancel()
            await asyncio.shield(asyncio.ensure_future(_give_back(lock, acquiring)))


async def _give_back(lock: RWLock, acquiring: asyncio.Future[None]) -> None:
    await asyncio.wait({acquiring})
    if not acquiring.cancelled() and acquiring.exception() is None:
        await lock.release_writer()
        return
    # requests that queued behind it are woken by a lock that is given back, and by nothing else
    async with lock._cond:
        lock._cond.notify_all()
