"""The launching process of several workers notices that the server is to end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable

from sglang.srt.utils import kill_process_tree

logger = logging.getLogger(__name__)
# signals on which uvicorn and granian end a server
_TELL = frozenset((signal.SIGTERM, signal.SIGINT))


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
