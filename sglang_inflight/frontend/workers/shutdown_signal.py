"""Signals to a server with several tokenizer workers: its launching process receives them.

A worker does not know whether the server was told to go. It may be told alone, by who restarts
workers one after the other, and the server goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable

from sglang.srt.utils import kill_process_tree

logger = logging.getLogger(__name__)

# what uvicorn and granian end a server by
_TELL = frozenset((signal.SIGTERM, signal.SIGINT))


class ShutdownSignal:
    """Hears of signals beside their handlers, which are the HTTP server's: Python writes the
    number of each into a socket.

    SIGQUIT is how SGLang says in this process that a rank or a detokenizer has failed. SGLang's
    handler then kills the server. uvicorn puts handlers of its own in place of all others when it
    begins to supervise workers, and has nothing to do at SIGQUIT: the server would go on without
    the rank, and answer nobody.
    """

    def __init__(self) -> None:
        """In the main thread, where Python has signals, before the HTTP server has its own."""
        self._read, self._written = socket.socketpair()
        self._read.setblocking(False)
        self._written.setblocking(False)
        signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        # SGLang's, or one that was given to it
        self._end_of_a_child = signal.getsignal(signal.SIGQUIT)

    async def listen(self, told: Callable[[], None]) -> None:
        """On any thread's event loop, for ever. ``told`` is called when the server is to go."""
        loop = asyncio.get_running_loop()
        while True:
            numbers = await loop.sock_recv(self._read, 64)
            if signal.SIGQUIT in numbers:
                self._end()
            if _TELL.intersection(numbers):
                told()

    def _end(self) -> None:
        """End the server as with one worker, unless SGLang's handler is in place and does so."""
        handler = self._end_of_a_child
        if signal.getsignal(signal.SIGQUIT) is handler:
            return
        logger.critical("SIGQUIT: a process of this server has failed, and so the server ends.")
        if callable(handler):
            handler(signal.SIGQUIT, None)
        else:
            kill_process_tree(os.getpid())
