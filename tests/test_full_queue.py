"""A retracted request and a full queue."""

from __future__ import annotations

import pytest

from harness.server import Server
from tests.support.load import (
    ENDLESS,
    expect_all_go_on,
    pause,
    resume,
    start,
    start_running,
    until_waiting,
)
from tests.support.pool import (
    MAX_QUEUED,
    MAX_RUNNING,
)


@pytest.mark.guards_fix
def test_full_queue_drops_no_retracted_request(normal_loop_server: Server) -> None:
    server = normal_loop_server
    generations = start_running(server, MAX_RUNNING, tokens=ENDLESS)
    generations += start(server, MAX_QUEUED - 1, tokens=ENDLESS)
    until_waiting(server, MAX_QUEUED - 1)
    pause(server, "retract")
    resume(server)
    expect_all_go_on(generations)
