"""What every worker is told, and whether it has heard it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from sglang_inflight.frontend.workers.protocol import (
    Abort,
    Aborted,
    Ack,
    AdapterRefs,
    Idle,
    Moved,
    ServerState,
    Uses,
    line,
    read_said,
)

logger = logging.getLogger(__name__)

# A worker tokenizes on its event loop, and may be stopped for a debugger.
HEARING_TIMEOUT_S = 10.0


class _Reader:
    """One worker's connection. ``heard`` is the number of the state that it acts on."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.heard = 0
        # nobody waits for it until it has said something
        self.is_silent = False
        self.is_drained = False
        # how many requests it has ended, by the number of the abort
        self.aborted: dict[int, int] = {}
        self.uses: Uses = {}


class StateBroadcast:
    """Tells every worker the same, in the same order. Lives on the owner's event loop.

    A worker that connects is told at once what there is to know, and is among the readers from
    then on: nothing is awaited in between, so no state passes it by. One that has ended is no
    reader any more, and nobody waits for it.
    """

    def __init__(
        self,
        read: Callable[[], ServerState],
        count: Callable[[Uses, Uses], Awaitable[None]],
        end: Callable[[], None],
    ) -> None:
        """``read`` looks up what is so now; ``count`` is told how a worker used adapters before,
        and how it does now; ``end`` is called once, when the server was told to go and no worker
        is left that has requests.
        """
        self._read = read
        self._count = count
        self._end = end
        self._may_end = False
        self._aborts = 0
        self._state = msgspec.structs.replace(read(), number=1)
        self._readers: set[_Reader] = set()
        self._heard = asyncio.Condition()

    def post(self) -> None:
        """Tell what has changed, if anything has."""
        state = msgspec.structs.replace(self._read(), number=self._state.number)
        if state != self._state:
            self._tell(state)

    def tell_of_move(self, rids: list[str], from_id: str, to_id: str) -> None:
        """Each worker knows the adapter by then that its requests go on with."""
        self.post()
        for reader in self._readers:
            reader.writer.write(line(Moved(rids, from_id, to_id)))
        # which is heard when that is
        self._tell(self._state)

    def _tell(self, state: ServerState) -> None:
        self._state = msgspec.structs.replace(state, number=self._state.number + 1)
        for reader in self._readers:
            reader.writer.write(line(self._state))

    async def abort(self, names: list[str]) -> int:
        """Have every worker end its requests of these names. Returns how many it was.

        A worker resolves a name to its own requests, and has told the schedulers to end them
        when it answers. So a request that a caller begins after the answer, under the same name
        and with any worker, goes on.
        """
        self._aborts = number = self._aborts + 1
        asked = set(self._readers)
        for reader in asked:
            reader.writer.write(line(Abort(number, names)))

        def waited_for() -> list[_Reader]:
            return [each for each in asked & self._readers if number not in each.aborted]

        try:
            async with asyncio.timeout(HEARING_TIMEOUT_S), self._heard:
                await self._heard.wait_for(lambda: not waited_for())
        except TimeoutError:
            logger.error(
                "%d tokenizer workers have not said within %g s that they end requests named %s",
                len(waited_for()),
                HEARING_TIMEOUT_S,
                names,
            )
        return sum(each.aborted.pop(number, 0) for each in asked)

    async def wait_acked(self) -> None:
        """Every worker acts on what is so now, or is silent, which is logged.

        One that is stopped keeps one answer waiting, and not each: it takes no request either.
        """
        self.post()
        number = self._state.number
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
        writer.write(line(self._state))
        try:
            while said := await reader.readline():
                match read_said(said):
                    case Ack(number=number):
                        one.heard, one.is_silent = number, False
                        async with self._heard:
                            self._heard.notify_all()
                    case Aborted(number=number, count=count):
                        one.aborted[number] = count
                        async with self._heard:
                            self._heard.notify_all()
                    case AdapterRefs(uses=uses):
                        before, one.uses = one.uses, uses
                        await self._count(before, uses)
                    case Idle():
                        one.is_drained = True
                        self._end_when_all_are_drained()
        except (ConnectionError, msgspec.DecodeError) as error:
            logger.warning("A tokenizer worker was lost: %r", error)
        finally:
            self._readers.discard(one)
            self._end_when_all_are_drained()
            await self._count(one.uses, {})
            async with self._heard:
                self._heard.notify_all()
            writer.close()

    def end_when_drained(self) -> None:
        """The server was told to go, and not one of its workers alone."""
        self._may_end = True
        self._end_when_all_are_drained()

    def _end_when_all_are_drained(self) -> None:
        """Those whose workers have died have no requests either."""
        if self._may_end and all(reader.is_drained for reader in self._readers):
            self._may_end = False
            self._end()
