"""Servers whose ranks are on several nodes (``--nnodes``)."""

from __future__ import annotations

from sglang_inflight.extension import Extension

EXTENSION = Extension(
    name="nodes",
    modules=(
        "sglang_inflight.extensions.nodes.check",
        "sglang_inflight.extensions.nodes.replies",
    ),
    serves=("nnodes",),
)
