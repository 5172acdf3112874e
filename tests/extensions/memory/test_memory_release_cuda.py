"""Memory released and resumed under waiting requests, on CUDA.

torch_memory_saver takes the pages from behind addresses used by captured graphs. Correct tokens
from a replayed graph prove that the pages returned to these addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.server import Server, serve
from tests.support import memory_release
from tests.support.load import (
    expect_whole,
    pause,
    resume,
    settle,
    start_running,
    update,
    versions_of,
)
from tests.support.memory_release import bytes_of, release, resume_memory
from tests.support.pool import ServerPool
from tests.support.updates import LIVE, expect_served, serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU with CUDA"),
]

# a GiB of KV, large beside the other memory of a server's processes on the card
TOKENS = (1 << 30) // memory_release.MODEL.token_bytes
KV, WEIGHTS, GRAPHS = "kv_cache", "weights", "cuda_graph"


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    for version in range(2):
        memory_release.MODEL.build(folder / f"v{version}", version)
    return folder


@pytest.fixture(scope="module")
def server(
    pool: ServerPool, versions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    pool.discard()  # one server at a time
    flags = (
        "--enable-memory-saver",
        "--max-total-tokens", str(TOKENS),
        "--cuda-graph-max-bs-decode", "4",
        # SGLang cannot release the graphs of a prefill
        "--disable-prefill-cuda-graph",
        # the log says of each step whether a graph ran
        "--decode-log-interval", "1",
        "--weight-version", "v0",
    )  # fmt: skip
    log = tmp_path_factory.mktemp("logs") / "cuda.log"
    # otherwise the memory saver leaves out the graphs' memory
    env = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
    with serve(versions / "v0", *flags, log=log, env=env) as server:
        yield server


def in_use() -> int:
    """Return the card's bytes in use by all processes."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free


@pytest.mark.parametrize(
    ("keep", "how"),
    [("host", None), ("discard", LIVE), ("discard", {})],
    ids=["kept", "sent", "sent by a blocking update"],
)
def test_requests_and_graphs_survive_a_memory_release(
    server: Server, versions: Path, keep: str, how: dict[str, Any] | None
) -> None:
    update(server, versions, 0, non_blocking=True, partial=False, kv_cache="recompute")
    served = serving(server)
    frozen = start_running(server, 2, tokens=400)
    pause(server, "retract")
    settle(server, frozen)
    kv, weights = TOKENS * memory_release.MODEL.token_bytes, memory_release.MODEL.weights_bytes
    before = in_use()
    released = release(server, keep_weights=keep)
    asleep = in_use()
    assert before - asleep > 0.9 * (kv + weights), released
    assert bytes_of(released, KV) > 0.9 * kv
    assert bytes_of(released, WEIGHTS) > 0.9 * weights
    assert bytes_of(released, GRAPHS) > 0
    refused = server.post("/update_weights_from_disk", {"model_path": str(versions / "v1"), **LIVE})
    assert refused["status_code"] == 409, refused
    resume_memory(server, WEIGHTS)
    if how is not None:
        # hollow weights, written in place without a cache
        update(server, versions, 1, **how)
    resume_memory(server, KV, GRAPHS)
    assert in_use() - asleep > 0.9 * (kv + weights)
    log = server.log_text()
    resume(server)
    expected = ["v0"] if how is None else ["v0", "v1"]
    for generation in frozen:
        assert versions_of(expect_whole(generation)) == expected
    assert "cuda graph: True" in server.log_text().removeprefix(log)
    expect_served(server, len(expected) - 1)
    if how is None:
        assert serving(server) == served
