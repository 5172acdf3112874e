"""Updates go by a load plan on servers whose weights are those of no checkpoint."""

from __future__ import annotations

from pathlib import Path

from harness.server import Server, serve
from tests.support.load import status, update
from tests.support.pool import ServerPool
from tests.support.updates import LIVE, expect_served


def planned(server: Server) -> tuple[int, int]:
    """Return how many tensors go by the plan, and how many by the model's loader."""
    ways = status(server)["staging"]["ways"]["target"]
    return ways["planned"]["tensors"], ways["by_loader"]["tensors"]


def test_server_with_random_weights_updates_by_a_plan(
    pool: ServerPool, checkpoints: Path, tmp_path: Path
) -> None:
    """A server with the checkpoint recalls that plan, and has it for all tensors, too."""
    pool.discard()
    env = {"SGLANG_INFLIGHT_CACHE": str(tmp_path / "cache")}
    for number, flags in enumerate([("--load-format", "dummy"), ()]):
        log = tmp_path / f"log{number}"
        with serve(checkpoints / "v0", *flags, log=log, env=env) as server:
            for version in (1, 2):
                update(server, checkpoints, version, **LIVE)
                expect_served(server, version)
                tensors, others = planned(server)
                assert tensors > 0
                assert others == 0
