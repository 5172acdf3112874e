"""Whether a server with several tokenizer workers was told to go: its launching process was.

A worker does not know. It may be told alone, by who restarts workers one after the other, and the
server goes on.
"""

from __future__ import annotations

import asyncio
import signal
import socket

# what uvicorn and granian end a server by
_TELL = frozenset((signal.SIGTERM, signal.SIGINT))


class ToldToGo:
    """Hears of signals beside their handlers, which are the HTTP server's: Python writes the
    number of each into a socket.
    """

    def __init__(self) -> None:
        """In the main thread, where Python has signals."""
        self._read, self._written = socket.socketpair()
        self._read.setblocking(False)
        self._written.setblocking(False)
        signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)

    async def wait(self) -> None:
        """On any thread's event loop."""
        loop = asyncio.get_running_loop()
        while not _TELL.intersection(await loop.sock_recv(self._read, 64)):
            pass
