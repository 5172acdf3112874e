"""Output of ``sglang-inflight status``, with and without a problem."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from sglang_inflight.cli.remote import _draw
from sglang_inflight.vocabulary.answers import (
    Capabilities,
    MemoryStatus,
    RankStatus,
    StagingStatus,
    Status,
)


def draw_status(hollow: str | None = None, **of_staging: Any) -> str:
    """Draw the status of a server with two equal ranks."""
    staging: dict[str, Any] = {
        "mode": "host", "state": "empty", "update_id": None, "tensors": 0, "bytes": 0,
        "can_roll_back": False, "dirty": None, "refusal": None, "groups": {"mine": "in step"},
    }  # fmt: skip
    state: dict[str, Any] = {
        "state": "running", "paused": False, "mode": None, "holders": (), "running": 0,
        "waiting": 0, "weight_version": "v1", "epoch": 1, "digest": None, "previous_version": None,
        "staging": StagingStatus(**(staging | of_staging)), "memory": MemoryStatus(hollow=hollow),
    }  # fmt: skip
    ranks = tuple(RankStatus(**state, dp_rank=0, tp_rank=rank, pp_rank=0) for rank in (0, 1))
    console = Console(width=100)
    with console.capture() as capture:
        console.print(_draw(Status(**state, capabilities=Capabilities(), ranks=ranks)))
    return capture.get()


@pytest.mark.parametrize(
    ("said", "name", "why"),
    [
        ({"dirty": "an update was not completed"}, "dirty weights", "an update was not completed"),
        ({"refusal": "is quantized by Fp8"}, "no updates", "is quantized by Fp8"),
        ({"hollow": "none were sent"}, "hollow weights", "none were sent"),
        ({"groups": {"mine": "broken: its time ran out"}}, "group mine", "broken: its time"),
    ],
)
def test_status_shows_each_problem_once(said: dict[str, Any], name: str, why: str) -> None:
    (line,) = [line for line in draw_status(**said).splitlines() if name in line]
    assert why in line


def test_status_without_problems_shows_none() -> None:
    shown = draw_status()
    assert shown.count("staging mode") == 1
    for word in ("dirty", "hollow", "no updates", "group"):
        assert word not in shown
