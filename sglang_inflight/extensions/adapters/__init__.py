"""LoRA adapters, loaded, replaced and unloaded while requests use them."""

from __future__ import annotations

from sglang_inflight.extension import Extension

EXTENSION = Extension(
    name="adapters",
    modules=(
        "sglang_inflight.extensions.adapters.adapters",
        "sglang_inflight.extensions.adapters.config",
        "sglang_inflight.extensions.adapters.loading",
        "sglang_inflight.extensions.adapters.on_rank",
        "sglang_inflight.extensions.adapters.weights",
    ),
    serves=("enable_lora",),
)
