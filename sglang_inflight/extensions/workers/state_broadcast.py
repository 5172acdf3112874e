"""Broadcast the owner's state to every worker, and collect the acks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from sglang_inflight.extensions.workers.protocol import (
    Abort,
    Aborted,
    Ack,
    AdapterRefs,
    Idle,
    Moved,
    ServerState,
    Uses,
    line,
    read_worker_message,
)

logger = logging.getLogger(__name__)

# long: a worker tokenizes on its event loop, and may be stopped in a debugger
ACK_TIMEOUT_S = 10.0


class _Reader:
    """One worker's connection. ``acked`` is the number of the last acked state."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.acked = 0
        # true: a wait has timed out, and later waits skip the worker until its next ack
        self.is_silent = False
        self.is_drained = False
        # abort's number -> number of aborted requests
        self.aborted: dict[int, int] = {}
        self.uses: Uses = {}


class StateBroadcast:
    """Sends every worker the same messages in the same order. Lives on the owner's event loop.

    A connecting worker gets the current state and joins the readers without an await in between,
    so it misses no state. A worker that has ended leaves the readers, and no call waits for it.
    """

    def __init__(
        self,
        read: Callable[[], ServerState],
        count: Callable[[Uses, Uses], Awaitable[None]],
        end: Callable[[], None],
    ) -> None:
        """Create a broadcast.

        ``read`` returns the current state. ``count`` gets a worker's previous and current counts
        of adapters' requests. ``end`` is called once, after SIGTERM to the server and the last
        worker's last request.
        """
        self._read = read
        self._count = count
        self._end = end
        self._may_end = False
        self._aborts = 0
        self._state = msgspec.structs.replace(read(), number=1)
        self._readers: set[_Reader] = set()
        self._changed = asyncio.Condition()

    def post(self) -> None:
        """Send the state if it has changed."""
        state = msgspec.structs.replace(self._read(), number=self._state.number)
        if state != self._state:
            self._send(state)

    def post_move(self, rids: list[str], from_id: str, to_id: str) -> None:
        """Tell workers that requests moved. Each worker knows the new adapter by then."""
        self.post()
        for reader in self._readers:
            reader.writer.write(line(Moved(rids, from_id, to_id)))
        # a new state number: its ack covers the move
        self._send(self._state)

    def _send(self, state: ServerState) -> None:
        self._state = msgspec.structs.replace(state, number=self._state.number + 1)
        for reader in self._readers:
            reader.writer.write(line(self._state))

    async def abort(self, names: list[str]) -> int:
        """Let every worker abort its requests of these names. Return the number of requests.

        A worker resolves names to its own requests, and answers after sending the schedulers the
        aborts. So a request sent to any worker after the answer, under the same name, goes on.
        """
        self._aborts = number = self._aborts + 1
        asked = set(self._readers)
        for reader in asked:
            reader.writer.write(line(Abort(number, names)))

        def waited_for() -> list[_Reader]:
            return [each for each in asked & self._readers if number not in each.aborted]

        try:
            async with asyncio.timeout(ACK_TIMEOUT_S), self._changed:
                await self._changed.wait_for(lambda: not waited_for())
        except TimeoutError:
            logger.error(
                "%d tokenizer workers have not acked within %g s the abort of requests named %s",
                len(waited_for()),
                ACK_TIMEOUT_S,
                names,
            )
        return sum(each.aborted.pop(number, 0) for each in asked)

    async def wait_acked(self) -> None:
        """Wait until every worker has applied the current state. Log silent workers.

        A stopped worker delays only one answer: it takes no requests, so later waits skip it.
        """
        self.post()
        number = self._state.number
        try:
            async with asyncio.timeout(ACK_TIMEOUT_S), self._changed:
                await self._changed.wait_for(lambda: not self._behind(number))
        except TimeoutError:
            silent = self._behind(number)
            logger.error(
                "%d tokenizer workers have not acked the served version within %g s, and may "
                "name an older one",
                len(silent),
                ACK_TIMEOUT_S,
            )
            for reader in silent:
                reader.is_silent = True

    def _behind(self, number: int) -> list[_Reader]:
        return [each for each in self._readers if each.acked < number and not each.is_silent]

    async def serve_worker(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a worker's connection until it ends."""
        one = _Reader(writer)
        self._readers.add(one)
        writer.write(line(self._state))
        try:
            while message := await reader.readline():
                match read_worker_message(message):
                    case Ack(number=number):
                        one.acked, one.is_silent = number, False
                        async with self._changed:
                            self._changed.notify_all()
                    case Aborted(number=number, count=count):
                        one.aborted[number] = count
                        async with self._changed:
                            self._changed.notify_all()
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
            async with self._changed:
                self._changed.notify_all()
            writer.close()

    def end_when_drained(self) -> None:
        """Note that the whole server is shutting down, and end it once all workers are idle."""
        self._may_end = True
        self._end_when_all_are_drained()

    def _end_when_all_are_drained(self) -> None:
        """End the server if all connected workers are idle. Dead workers do not count."""
        if self._may_end and all(reader.is_drained for reader in self._readers):
            self._may_end = False
            self._end()
