"""A front of its own process, in the place of a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from harness.server import PLAIN, Server, free_port
from harness.starting import end, start
from tests.support.load import until


class Front(Server):
    """The front, in the place of a server."""


@contextmanager
def run_front(urls: Sequence[str], log: Path) -> Iterator[Front]:
    """Run ``sglang-inflight front`` before the servers at ``urls``, one of which is ready."""
    port = free_port()
    named = [argument for url in urls for argument in ("--url", url)]
    command = ["-m", "sglang_inflight.cli", "front", *named, "--port", str(port)]
    with log.open("wb") as sink:
        process = start(command, output=sink)
    front = Front(f"http://127.0.0.1:{port}", process, log)
    try:
        until("the front is ready", lambda: _is_ready(front))
        yield front
    finally:
        end(process)


def _is_ready(front: Front) -> bool:
    assert front.is_alive(), front.log_text()
    with suppress(httpx.ConnectError):
        return httpx.get(front.url + "/ready", **PLAIN).is_success
    return False
