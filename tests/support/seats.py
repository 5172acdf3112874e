"""Servers for tests that may kill them: a test costs the starts of those that died before it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from harness.server import Server, serve
from tests.support.load import ask
from tests.support.pool import restore


class Seats:
    """Servers of one model, each with more flags of its own."""

    def __init__(
        self,
        model: Path,
        logs: Path,
        *flags: str,
        more: Sequence[Sequence[str]],
        env: dict[str, str] | None = None,
    ) -> None:
        self._model, self._logs, self._flags, self._env = model, logs, flags, env
        self._more = more
        self._starts = 0
        self._stacks = [ExitStack() for _ in more]
        self._servers: list[Server | None] = [None for _ in more]

    def fill(self) -> list[Server]:
        """Return all servers, as they are after their starts."""
        return [self._seat(place) for place in range(len(self._servers))]

    def _seat(self, place: int) -> Server:
        server = self._servers[place]
        if server is not None and server.is_alive():
            try:
                ask(server, "POST", "/inflight/drain", {"cancel": True})
                restore(server, self._model)
            except (AssertionError, httpx.HTTPError):
                # the next test gets a fresh one
                self._stacks[place].close()
                raise
            return server
        self._starts += 1
        self._stacks[place].close()
        block = serve(
            self._model, *self._flags, *self._more[place],
            log=self._logs / f"{self._starts}.log", env=self._env,
        )  # fmt: skip
        server = self._servers[place] = self._stacks[place].enter_context(block)
        return server

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()


@contextmanager
def seats(
    model: Path,
    logs: Path,
    *flags: str,
    more: Sequence[Sequence[str]],
    env: dict[str, str] | None = None,
) -> Iterator[Seats]:
    """Serve ``model`` at one server for each of ``more``, which has its flags."""
    made = Seats(model, logs, *flags, more=more, env=env)
    try:
        yield made
    finally:
        made.close()


def kill(server: Server) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()


def hand_back(server: Server) -> None:
    """Drain the server, whose requests end at once."""
    ask(server, "POST", "/inflight/drain", {"deadline_s": 0})
