"""LoRA adapters, loaded, replaced and unloaded while requests use them."""

from __future__ import annotations

from typing import Any

from sglang_inflight.extension import Extension


def _messages() -> tuple[type[Any], ...]:
    from sglang_inflight.extensions.adapters.messages import LoadAdapter, LoadAdapterFromTensors

    return LoadAdapter, LoadAdapterFromTensors


EXTENSION = Extension(
    name="adapters",
    modules=(
        "sglang_inflight.extensions.adapters.adapters",
        "sglang_inflight.extensions.adapters.config",
        "sglang_inflight.extensions.adapters.loading",
        "sglang_inflight.extensions.adapters.on_rank",
        "sglang_inflight.extensions.adapters.weights",
    ),
    messages=_messages,
    serves=("enable_lora",),
)
