"""Servers for TRL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.server import Server, serve
from tests.trainers.environment import python_of
from tests.trainers.trl import policy

RANK = 8
# TRL keeps the adapters of the last five versions, and loads the next one before it unloads
ADAPTERS = 8
WITH_ADAPTERS = (
    "--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(RANK),
    "--max-loras-per-batch", str(ADAPTERS),
    "--lora-target-modules", "q_proj", "v_proj", "o_proj", "down_proj",
)  # fmt: skip


@dataclass(frozen=True)
class ServedModel:
    """A server, its model, and the rank of the adapters that it takes (0: none)."""

    server: Server
    model: Path
    rank: int


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy.build(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module", params=["adapters", "weights"])
def served(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModel]:
    """A server in float32, to which TRL sends adapters, or all weights."""
    python_of("trl")
    rank = RANK if request.param == "adapters" else 0
    with serve(
        model,
        "--dtype",
        "float32",
        *(WITH_ADAPTERS if rank else ()),
        log=tmp_path_factory.mktemp("logs") / "server.log",
        env={"SGLANG_INFLIGHT_VLLM_ROUTES": "1", "SGLANG_INFLIGHT_PAUSE_LEASE_S": "30"},
    ) as server:
        yield ServedModel(server, model, rank)
