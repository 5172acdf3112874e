"""A server that is told to go."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import ShutdownReq

from sglang_inflight.errors import InflightError
from sglang_inflight.frontend.bodies import ContinueBody, ResumeMemoryBody
from sglang_inflight.frontend.frontend import Frontend

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedSignalHandler, PatchedTokenizerManager

logger = logging.getLogger(__name__)


def end_pauses(_: None, handler: PatchedSignalHandler, *args: Any) -> None:
    """After upstream's handler of SIGTERM, on the event loop.

    Upstream then waits until the last request has ended, and in a pause none ends. One of
    several workers may have been told alone, and the server goes on: the owner decides.
    """
    tokenizer_manager = handler.tokenizer_manager
    if tokenizer_manager.inflight.worker is None:
        let_go(tokenizer_manager)


async def exit_after_forwarded_calls(
    watch: Callable[..., Awaitable[None]], tokenizer_manager: PatchedTokenizerManager
) -> None:
    """Around upstream's wait for the end of its requests, which then ends the process of a
    worker, whatever it still has to answer.
    """
    try:
        await watch(tokenizer_manager)
    except SystemExit:
        if (worker := tokenizer_manager.inflight.worker) is not None:
            await worker.until_answered()
        raise


def end_schedulers(
    dispatch: Callable[..., None], tokenizer_manager: PatchedTokenizerManager, obj: object
) -> None:
    """Around what goes to the schedulers, of which upstream's last message ends them.

    A worker may have no request when others have, so the owner ends them for all. What waits
    for them has no other answer: upstream's HTTP server would wait for its connections for ever.
    """
    if not isinstance(obj, ShutdownReq):
        dispatch(tokenizer_manager, obj)
        return
    frontend = tokenizer_manager.inflight
    if frontend.worker is None:
        dispatch(tokenizer_manager, obj)
    else:
        frontend.worker.end()
    frontend.lifetime.end("the server was told to go, and its ranks ended")


def let_go(tokenizer_manager: PatchedTokenizerManager) -> None:
    if tokenizer_manager.is_pause:
        logger.warning("The server is told to go: its pauses end, so that its requests can.")
    frontend = tokenizer_manager.inflight
    frontend.in_background(_let_go(frontend))


async def _let_go(frontend: Frontend) -> None:
    """Requests that wait for memory can end when it is back; with 503 where that is hollow."""
    try:
        if released := await frontend.memory.released():
            await frontend.memory.resume(ResumeMemoryBody(tags=released))
    except InflightError as error:
        logger.warning("%s", error)
    await frontend.pauses.resume(ContinueBody(torch_empty_cache=False))
    await frontend.updates.let_go("the server was told to go")
