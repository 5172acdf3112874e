"""Parts of tensors, from the ranks of a trainer straight to the ranks that use them."""

from __future__ import annotations

from sglang_inflight.extension import Extension

EXTENSION = Extension(
    name="shards",
    modules=(
        "sglang_inflight.extensions.shards.front_end",
        "sglang_inflight.extensions.shards.on_rank",
        "sglang_inflight.extensions.shards.wire",
    ),
)
