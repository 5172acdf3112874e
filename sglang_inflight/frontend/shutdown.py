"""End a server with us: end pauses, answer waiting calls, end the schedulers.

A SIGTERM shuts the server down. With several tokenizer workers only a SIGTERM to the launcher does.
A SIGTERM to a worker may only restart that worker, while the server goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import ShutdownReq
from sglang.srt.utils import kill_process_tree

from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.hooking import AFTER, AROUND, TOKENIZER_MANAGER, hook, with_us
from sglang_inflight.vocabulary.bodies import ContinueBody, ResumeMemoryBody
from sglang_inflight.vocabulary.errors import InflightError

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedSignalHandler, PatchedTokenizerManager

logger = logging.getLogger(__name__)
# signals on which uvicorn and granian end a server
_TELL = frozenset((signal.SIGTERM, signal.SIGINT))


@hook("sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler", AFTER, when=with_us)
def end_pauses(_: None, handler: PatchedSignalHandler, *args: Any) -> None:
    """End pauses and waits for versions after SGLang's SIGTERM handler, on the event loop.

    SGLang then waits for the last request's end, and no request ends during a pause. With several
    workers the owner decides: SIGTERM may have reached one worker only, and the server goes on.
    """
    tokenizer_manager = handler.tokenizer_manager
    tokenizer_manager.inflight.versions.end("the server is shutting down (SIGTERM)")
    if tokenizer_manager.inflight.worker is None:
        release_all(tokenizer_manager)


@hook(f"{TOKENIZER_MANAGER}.sigterm_watchdog", AROUND, when=with_us)
async def exit_after_forwarded_calls(
    watch: Callable[..., Awaitable[None]], tokenizer_manager: PatchedTokenizerManager
) -> None:
    """Let a worker answer its forwarded calls before SGLang's ``watch`` exits the process."""
    try:
        await watch(tokenizer_manager)
    except SystemExit:
        if (worker := tokenizer_manager.inflight.worker) is not None:
            await worker.until_answered()
        raise


@hook(f"{TOKENIZER_MANAGER}._dispatch_to_scheduler", AROUND, when=with_us)
def end_schedulers(
    dispatch: Callable[..., None], tokenizer_manager: PatchedTokenizerManager, obj: object
) -> None:
    """Intercept the ``ShutdownReq`` to the schedulers, SGLang's last message.

    A worker may have no request while others have, so the owner ends the schedulers for all.
    Calls waiting for ranks are failed here: SGLang's HTTP server would wait for their
    connections for ever.
    """
    if not isinstance(obj, ShutdownReq):
        dispatch(tokenizer_manager, obj)
        return
    frontend = tokenizer_manager.inflight
    if frontend.worker is None:
        dispatch(tokenizer_manager, obj)
    else:
        frontend.worker.end()
    frontend.lifetime.end("the server was shut down (SIGTERM), and its ranks ended")


def release_all(tokenizer_manager: PatchedTokenizerManager) -> None:
    if tokenizer_manager.is_pause:
        logger.warning("SIGTERM: releasing all pauses, so that running requests can finish.")
    frontend = tokenizer_manager.inflight
    frontend.in_background(_release_all(frontend))


async def _release_all(frontend: Frontend) -> None:
    """Resume memory and release pauses, so that requests can end: with 503 on hollow weights."""
    try:
        if released := await frontend.memory.released():
            await frontend.memory.resume(ResumeMemoryBody(tags=released))
    except InflightError as error:
        logger.warning("%s", error)
    await frontend.pauses.resume(ContinueBody(torch_empty_cache=False))
    await frontend.updates.drop_all("the server is shutting down (SIGTERM)")


class ShutdownSignal:
    """Receives signals beside the HTTP server's handlers: Python writes each number to a socket.

    SGLang sends SIGQUIT to this process when a rank or a detokenizer has failed, and SGLang's
    handler kills the server. uvicorn replaces that handler when it starts to supervise workers,
    and ignores SIGQUIT. The server would go on without the rank, and answer no call.
    """

    def __init__(self) -> None:
        """Install on the main thread, as Python requires, before the HTTP server's handlers."""
        self._read, self._written = socket.socketpair()
        self._read.setblocking(False)
        self._written.setblocking(False)
        signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        # SGLang's handler, or a user's
        self._end_of_a_child = signal.getsignal(signal.SIGQUIT)

    async def listen(self, on_signal: Callable[[], None]) -> None:
        """Wait for signals forever, on any event loop. SIGTERM and SIGINT call ``on_signal``."""
        loop = asyncio.get_running_loop()
        while True:
            numbers = await loop.sock_recv(self._read, 64)
            if signal.SIGQUIT in numbers:
                self._end()
            if _TELL.intersection(numbers):
                on_signal()

    def _end(self) -> None:
        """End the server, unless SGLang's own handler is still installed and does so."""
        handler = self._end_of_a_child
        if signal.getsignal(signal.SIGQUIT) is handler:
            return
        logger.critical("SIGQUIT: a process of this server has failed. The server shuts down.")
        if callable(handler):
            handler(signal.SIGQUIT, None)
        else:
            kill_process_tree(os.getpid())
