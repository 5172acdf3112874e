"""Operations on a server with running requests, one for each column of the table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.server import Server
from tests.matrix.configurations import Configuration, Generate
from tests.support.load import (
    ENDLESS,
    Generation,
    Output,
    expect_spans,
    more_tokens,
    settle,
    versions_of,
)
from tests.support.pool import empty
from tests.support.updates import Sender

STREAMS = 3


class Refusal(Exception):
    """A refusal in the server's words, which changed nothing."""


@dataclass
class Running:
    """Servers, each called in turn, and their running requests."""

    servers: Sequence[Server]
    generate: Generate
    configuration: Configuration
    sender: Sender
    streams: list[Generation] = field(default_factory=list)

    def begin(self, *, tokens: int = ENDLESS) -> None:
        self.streams = [self.generate(tokens=tokens) for _ in range(STREAMS)]
        for stream in self.streams:
            stream.wait_for_tokens(3)

    def expect_more_tokens(self) -> None:
        more_tokens(self.streams)

    def expect_frozen(self) -> None:
        # the last server produces the tokens
        settle(self.servers[-1], self.streams)

    def ask(self, path: str, **body: Any) -> None:
        """Call every server. Raise ``Refusal`` if one refuses."""
        for server in self.servers:
            self._read(server.post(path, body))

    def _read(self, answer: dict[str, Any]) -> None:
        if answer["status_code"] == 200:
            return
        assert 400 <= answer["status_code"] < 500 or answer["status_code"] == 501, answer
        raise Refusal(answer["message"])

    def why_not(self, row: str) -> str | None:
        """Return the reason of the first server whose ``capabilities`` refuse ``row``."""
        said = (server.get("/inflight/status")["capabilities"][row] for server in self.servers)
        return next((why for why in said if why is not None), None)

    def update(self, version: int, source: str = "disk", **fields: Any) -> None:
        """Update every server. Raise ``Refusal`` if one refuses."""
        named = {"weight_version": f"v{version}", "non_blocking": True, **fields}
        ranks = self.configuration.ranks
        for server in self.servers:
            self._read(self.sender.send(server, source, version, ranks=ranks, **named))

    def end(self, *, by_abort: bool = True) -> list[Output]:
        """Return the streams' outputs. No stream may have ended before, and spans must be exact."""
        streams, self.streams = self.streams, []
        for stream in streams if by_abort else ():
            assert not stream.has_ended, f"{stream.rid} is lost: {stream.refusal}"
            stream.abort()
        outputs = [stream.output() for stream in streams]
        for output in outputs:
            expect_spans(output)
        return outputs


Column = Callable[[Running], None]


def _pause(mode: str) -> Column:
    """Return the column of a mode that freezes requests and later continues them."""

    def run(the: Running) -> None:
        the.begin()
        the.ask("/pause_generation", mode=mode)
        the.expect_frozen()
        the.ask("/continue_generation")
        the.expect_more_tokens()
        the.end()

    return run


def _abort(the: Running) -> None:
    """Abort requests by a pause, then serve new ones."""
    the.begin()
    the.ask("/pause_generation", mode="abort")
    the.end(by_abort=False)
    the.ask("/continue_generation")
    the.begin()
    the.end()


def _wait(the: Running) -> None:
    """Let running requests end in a pause, then serve new ones."""
    the.begin(tokens=40)
    the.ask("/pause_generation", mode="wait")
    for output in the.end(by_abort=False):
        assert len(output.tokens) == 40
    the.ask("/continue_generation")
    the.begin()
    the.end()


def _update(source: str, kv_cache: str) -> Column:
    """Return the column of an update with running requests."""

    def run(the: Running) -> None:
        the.begin()
        the.update(1, source, kv_cache=kv_cache)
        the.expect_more_tokens()
        for output in the.end():
            assert versions_of(output)[-1] == "v1"

    return run


def _rollback(the: Running) -> None:
    the.begin()
    the.update(1, kv_cache="keep")
    the.expect_more_tokens()
    the.ask("/inflight/rollback", kv_cache="keep")
    the.expect_more_tokens()
    for output in the.end():
        assert versions_of(output)[-2:] == ["v1", "v0"]


def _kv_versions(the: Running) -> None:
    """Check that answers have the KV's versions."""
    the.begin()
    the.update(1, kv_cache="keep")
    the.expect_more_tokens()
    for output in the.end():
        if "kv_versions" not in output.meta:
            raise Refusal("answers have no `kv_versions`")
        versions = [span["version"] for span in output.meta["kv_versions"]]
        # each of two servers has its own span
        assert [version for version, _ in itertools.groupby(versions)] == ["v0", "v1"]


def _release(the: Running) -> None:
    """Release all memory while requests wait, and resume it."""
    the.begin()
    the.ask("/pause_generation", mode="retract")
    the.ask("/release_memory_occupation", keep_weights="host")
    the.ask("/resume_memory_occupation")
    the.ask("/continue_generation")
    the.expect_more_tokens()
    the.end()


COLUMNS: dict[str, Column] = {
    "`abort`": _abort,
    "`in_place`": _pause("in_place"),
    "`retract`": _pause("retract"),
    "`wait`": _wait,
    "disk": _update("disk", "keep"),
    "tensor": _update("tensor", "keep"),
    "distributed": _update("distributed", "keep"),
    "ipc": _update("ipc", "keep"),
    "`fence`": _update("disk", "fence"),
    "`recompute`": _update("disk", "recompute"),
    "rollback": _rollback,
    "`kv_versions`": _kv_versions,
    "release": _release,
}

# the row of ``capabilities`` that refuses a column
ROWS = {
    "`abort`": "pause",
    "`in_place`": "pause",
    "`retract`": "retract",
    "`wait`": "pause",
    "`fence`": "fence",
    "`recompute`": "recompute",
    "release": "keep_weights",
}

# a cell that cannot be run here
NOT_RUN = "not run: ranks on one CPU have one address, and on GPUs one each"


def why_not_run(configuration: Configuration, column: str) -> str | None:
    return NOT_RUN if column == "ipc" and configuration.ranks > 1 else None


def restore_servers(the: Running) -> None:
    """Restore the servers: no request, no pause, v0."""
    the.ask("/continue_generation")
    for server in the.servers:
        empty(server)
    the.update(0, kv_cache="keep")
    the.ask("/flush_cache")
