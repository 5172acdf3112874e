"""Ports that the harness hands out to servers of tests."""

from __future__ import annotations

import os

import pytest

import harness.server
from harness.server import free_port
from tests.support import forked

# two picks of SGLang's, which no other test and no other run on this machine claims
FIRST = 65536 + 2 * os.getpid()
SECOND = FIRST + 1

CLAIM_THE_FIRST = f"""
import harness.server
harness.server.get_free_port_below_ephemeral = lambda **_: {FIRST}
print(harness.server.free_port(), flush=True)
input()
"""


def test_port_that_another_test_process_waits_to_bind_is_handed_out_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with forked.talk(["-c", CLAIM_THE_FIRST]) as other:
        assert other.says.readline() == f"{FIRST}\n"
        picks = iter([FIRST, SECOND])
        monkeypatch.setattr(
            harness.server, "get_free_port_below_ephemeral", lambda **_: next(picks)
        )
        assert free_port() == SECOND
        print(file=other.hears, flush=True)
        assert other.process.wait() == 0
