"""A marker model with weights and a KV cache large enough to measure their release."""

from __future__ import annotations

from typing import Any

from harness import marker
from harness.server import Server, schedulers
from tests.support.faults import ENV
from tests.support.large_marker import LargeMarker
from tests.support.load import ask
from tests.support.pool import Flavour
from tests.support.resident import resident as of_process

# embeddings and head of 16 MiB each
MODEL = LargeMarker(vocab=128 << 10, heads=marker.HEADS, kv_heads=4, head_dim=64)
TOKENS = 16384

FLAVOUR = Flavour(
    (
        "--enable-memory-saver",
        "--max-total-tokens", str(TOKENS),
        "--enable-metrics",
        "--weight-version", "v0",
    ),
    {**ENV, "SGLANG_INFLIGHT_VLLM_ROUTES": "1", "SGLANG_REQ_WAITING_TIMEOUT": "60"},
)  # fmt: skip


def resident(server: Server) -> int:
    """Return the resident bytes of all ranks together."""
    return sum(of_process(rank.pid) for rank in schedulers(server.process.pid))


def release(server: Server, *tags: str, **fields: Any) -> Any:
    return ask(server, "POST", "/release_memory_occupation", {"tags": list(tags), **fields})


def resume_memory(server: Server, *tags: str) -> Any:
    return ask(server, "POST", "/resume_memory_occupation", {"tags": list(tags)})


def bytes_of(moved: Any, *kinds: str) -> int:
    """Return all ranks' bytes of the named kinds of memory."""
    total: int = sum(rank["bytes"][kind] for rank in moved["ranks"] for kind in kinds)
    return total
