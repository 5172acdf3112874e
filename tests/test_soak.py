"""Random operations and faults under load. See ``tests/support/soak.py``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.server import Server
from harness.trainer import Trainers
from tests.support.soak import Soak, show
from tests.support.updates import Sender

pytest_plugins = ["tests.support.fixtures"]

SEED = int(os.environ.get("INFLIGHT_TEST_SEED", "20261121"))
MINUTES = float(os.environ.get("INFLIGHT_TEST_SOAK_MINUTES", "0.5"))


@pytest.mark.timeout(60 * MINUTES + 240)
def test_soak_loses_no_request_and_no_token(
    server: Server, checkpoints: Path, sender: Sender, trainers: Trainers
) -> None:
    expect_no_loss(Soak(server, checkpoints, sender, trainers, SEED), MINUTES)


@pytest.mark.timeout(60 * MINUTES + 240)
def test_soak_with_transparent_windows_loses_no_request_and_no_token(
    transparent_server: Server, checkpoints: Path, sender: Sender, trainers: Trainers
) -> None:
    soak = Soak(transparent_server, checkpoints, sender, trainers, SEED, transparent=True)
    expect_no_loss(soak, MINUTES / 2)


def expect_no_loss(soak: Soak, minutes: float) -> None:
    numbers = soak.run(minutes)
    show(numbers)
    assert numbers.losses == []
    assert numbers.tokens_checked > 0
