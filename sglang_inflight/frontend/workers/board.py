"""What every worker is told, and whether it has heard it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from sglang_inflight.frontend.workers.news import Heard, News, line, read_said

logger = logging.getLogger(__name__)

# A worker tokenizes on its event loop, and may be stopped for a debugger.
HEARING_TIMEOUT_S = 10.0


class _Reader:
    """One worker's connection. ``heard`` is the number of the news that it acts on."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.heard = 0
        # nobody waits for it until it has said something
        self.is_silent = False


class Board:
    """Tells every worker the same, in the same order. Lives on the owner's event loop.

    A worker that connects is told at once what there is to know, and is among the readers from
    then on: nothing is awaited in between, so no news passes it by. One that has ended is no
    reader any more, and nobody waits for it.
    """

    def __init__(self, read: Callable[[], News], leave: Callable[[], None]) -> None:
        """``read`` looks up what is so now; ``leave`` is called when a worker is told to go."""
        self._read = read
        self._leave = leave
        self._news = msgspec.structs.replace(read(), number=1)
        self._readers: set[_Reader] = set()
        self._heard = asyncio.Condition()

    def post(self) -> None:
        """Tell what has changed, if anything has."""
        number = self._news.number
        news = msgspec.structs.replace(self._read(), number=number)
        if news == self._news:
            return
        self._news = msgspec.structs.replace(news, number=number + 1)
        for reader in self._readers:
            reader.writer.write(line(self._news))

    async def until_heard(self) -> None:
        """Every worker acts on what is so now, or is silent, which is logged.

        One that is stopped keeps one answer waiting, and not each: it takes no request either.
        """
        self.post()
        number = self._news.number
        try:
            async with asyncio.timeout(HEARING_TIMEOUT_S), self._heard:
                await self._heard.wait_for(lambda: not self._behind(number))
        except TimeoutError:
            silent = self._behind(number)
            logger.error(
                "%d tokenizer workers have not heard within %g s what is served now, and may "
                "name an older version",
                len(silent),
                HEARING_TIMEOUT_S,
            )
            for reader in silent:
                reader.is_silent = True

    def _behind(self, number: int) -> list[_Reader]:
        return [each for each in self._readers if each.heard < number and not each.is_silent]

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A worker's connection, to its end."""
        one = _Reader(writer)
        self._readers.add(one)
        writer.write(line(self._news))
        try:
            while said := await reader.readline():
                match read_said(said):
                    case Heard(number=number):
                        one.heard, one.is_silent = number, False
                        async with self._heard:
                            self._heard.notify_all()
                    case _:
                        self._leave()
        except (ConnectionError, msgspec.DecodeError) as error:
            logger.warning("A tokenizer worker was lost: %r", error)
        finally:
            self._readers.discard(one)
            async with self._heard:
                self._heard.notify_all()
            writer.close()
