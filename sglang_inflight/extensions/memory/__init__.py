"""Memory of weights, KV cache and graphs, released while requests wait, and resumed."""

from __future__ import annotations

from sglang_inflight.extension import Extension

EXTENSION = Extension(
    name="memory",
    modules=(
        "sglang_inflight.extensions.memory.front_end",
        "sglang_inflight.extensions.memory.on_rank",
    ),
)
