"""A transparent pause that brings half of the weights."""

from __future__ import annotations

from pathlib import Path

from harness.trainer import Trainers
from tests.support.load import ENDLESS, more_tokens, start_running
from tests.support.pool import ServerPool
from tests.support.updates import (
    expect_to_run_on,
    refuse,
    serving,
)
from tests.test_whole_sessions import END, nemo_of, send_half, serve, sync

pytest_plugins = ["tests.support.fixtures"]


def test_failed_transfer_in_flight_changes_nothing(
    pool: ServerPool, checkpoints: Path, trainers: Trainers
) -> None:
    for server in serve(pool, "whole_transparent_server"):
        client = nemo_of(server, checkpoints, trainers)
        before = serving(server)
        running = start_running(server, 2, tokens=ENDLESS)
        missing = send_half(client, 2)
        # the end is decided by continue_generation
        assert server.post(END, {})["status_code"] == 200
        refuse(client.resume(), "nothing has changed", missing[0])
        more_tokens(running)
        assert serving(server) == before
        sync(client, 3)
        expect_to_run_on(server, running, [0, 3])
