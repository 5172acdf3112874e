"""Random operations at random times: each request is answered once, and correctly."""

from __future__ import annotations

from pathlib import Path

from harness.server import Server
from tests.support.random_operations import act_at_random


def test_random_operations_answer_each_request_once(server: Server, checkpoints: Path) -> None:
    act_at_random(server, checkpoints, 200)


def test_random_operations_without_overlap_answer_each_request_once(
    normal_loop_server: Server, checkpoints: Path
) -> None:
    act_at_random(normal_loop_server, checkpoints, 60)
