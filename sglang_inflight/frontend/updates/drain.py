"""Wait for running requests to end, for blocking updates.

SGLang's own updates wait until running requests have ended, and hold new requests back
meanwhile. In a pause an update does not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from sglang_inflight.frontend.aio import Deadline
from sglang_inflight.frontend.pauses import Pauses
from sglang_inflight.frontend.updates.open_update import OpenUpdate
from sglang_inflight.sglang_types import get_disagg, get_serving
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.errors import Conflict, Refused

if TYPE_CHECKING:
    from sglang.srt.utils.aio_rwlock import RWLock

    from sglang_inflight.sglang_types import TokenizerManager

# poll period for a pause, while an update waits for running requests
POLL_S = 0.05


class NoRequestsRunning:
    """Holds requests back for the duration of a block. Lives on the front end's event loop.

    Only the update with the turn uses it. So an update never waits for a later one, and requests
    are held back only for the current update, never for a queued one.
    """

    def __init__(
        self, tokenizer_manager: TokenizerManager, pauses: Pauses, can: Capabilities
    ) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._pauses = pauses
        self._can = can

    @asynccontextmanager
    async def held(self, update_id: str, deadline: Deadline) -> AsyncIterator[None]:
        """Let no request run in the block, unless a caller continues generation meanwhile.

        Raises ``Conflict`` if requests still run at ``deadline``.
        """
        reason = self._can.pause
        if get_disagg().disaggregation_mode == "decode":
            # a pause would leave received KV in place, and not all of it could be recomputed
            reason = "a pause keeps KV received from the prefill server (--disaggregation-mode)"
        if reason is None:
            block = self._pauses.held_while_nothing_runs(f"update-{update_id}", deadline)
        elif get_serving().tokenizer_worker_num > 1:
            raise Refused(
                "with --tokenizer-worker-num above 1 an update needs a pause to wait for running "
                f"requests: {reason}; pass non_blocking=true"
            )
        else:
            block = self._locked(deadline)
        async with block:
            yield

    async def enter(self, stack: AsyncExitStack, update: OpenUpdate, deadline: Deadline) -> None:
        """Enter ``held`` on ``stack``. Raises ``Dropped`` if the update is dropped meanwhile."""
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
        """Hold requests back by SGLang's ``model_update_lock``, on servers without our pauses.

        A task of its own takes the lock, and ends before this function does. So the lock is
        always released, even after a cancellation. In a pause the lock is not needed: new requests
        stay in the server's queue.
        """
        if self._tokenizer_manager.is_pause:
            yield
            return
        lock = self._tokenizer_manager.model_update_lock
        acquiring = asyncio.ensure_future(lock.acquire_writer())
        try:
            while not acquiring.done() and not self._tokenizer_manager.is_pause:
                if deadline.is_over:
                    raise Conflict(
                        "requests still ran at the update's time limit: pass non_blocking=true"
                    )
                await asyncio.wait({acquiring}, timeout=POLL_S)
            yield
        finally:
            acquiring.cancel()
            await asyncio.shield(asyncio.ensure_future(_release(lock, acquiring)))


async def _release(lock: RWLock, acquiring: asyncio.Future[None]) -> None:
    await asyncio.wait({acquiring})
    if not acquiring.cancelled() and acquiring.exception() is None:
        await lock.release_writer()
        return
    # requests queued behind the cancelled writer sleep until the lock notifies them
    async with lock._cond:
        lock._cond.notify_all()
