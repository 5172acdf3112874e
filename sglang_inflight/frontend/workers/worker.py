"""One of several tokenizer workers."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from sglang_inflight.frontend.caches import clear_preprocessed
from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.tasks import keep
from sglang_inflight.frontend.workers.invitation import Invitation
from sglang_inflight.frontend.workers.news import Heard, Leaving, News, line, read_news

if TYPE_CHECKING:
    from sglang_inflight.frontend.upstream.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)


class Worker:
    """Takes requests, and tells SGLang's readers in this process what the owner says.

    Made before the worker takes its first request, and it has heard the news by then: also one
    that is started anew, after another one died, whose arguments are those of the server's
    start. Lives on the worker's event loop.
    """

    def __init__(
        self, invitation: Invitation, frontend: Frontend, tokenizer_manager: TokenizerManager
    ) -> None:
        self._frontend = frontend
        self._tokenizer_manager = tokenizer_manager
        self._writer: asyncio.StreamWriter | None = None
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(invitation.news))
        # no byte more than the line, because the rest is read elsewhere
        with connection.makefile("rb", buffering=0) as file:
            self._news = read_news(file.readline())
        self._act(self._news)
        connection.setblocking(False)
        keep(tokenizer_manager.asyncio_tasks, self._listen(connection))

    async def mode(self) -> str | None:
        """Of the pause that holds. What ranks said to a question that was asked before a pause
        was taken says nothing of it, so the news keep the last word of whether there is one.
        """
        mode = await self._frontend.pauses.mode()
        self._tokenizer_manager.is_pause = self._news.paused
        return mode

    def leave(self) -> None:
        """This worker was told to go, so that pauses must end."""
        if self._writer is not None:
            self._writer.write(line(Leaving()))

    async def _listen(self, connection: socket.socket) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        self._writer.write(line(Heard(self._news.number)))
        while news := await reader.readline():
            self._act(read_news(news))
            self._writer.write(line(Heard(self._news.number)))
        logger.error("The process that owns the server's state has ended.")

    def _act(self, news: News) -> None:
        tokenizer_manager, before = self._tokenizer_manager, self._news
        self._news = news
        tokenizer_manager._update_weight_version_if_provided(news.weight_version)
        tokenizer_manager.model_path = news.model_path
        if news.load_format != tokenizer_manager.config_value("load_format"):
            tokenizer_manager.record_config_updates(
                "tokenizer.update_weights", load_format=news.load_format
            )
        if news.forgotten != before.forgotten:
            clear_preprocessed(tokenizer_manager)
        tokenizer_manager.is_pause = news.paused
        self._frontend.is_hollow = news.hollow
