"""Recomputes too old KV a little at each step, beside decoding."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_inflight.extension import Extension
from sglang_inflight.settings import counted, one_of, setting


@dataclass(frozen=True)
class RefreshSettings:
    kv_refresh: str = setting(
        "hard",
        one_of("hard", "soft"),
        "what running requests over kv_max_age do until their KV is recomputed: hard waits; soft "
        "goes on with the old KV",
        is_shared=True,
    )
    kv_refresh_tokens_per_step: int | None = setting(
        None,
        counted,
        "most tokens of running requests that a step computes again because of their KV's age; "
        "unset: all at once",
        is_shared=True,
    )


EXTENSION = Extension(
    name="refresh",
    modules=("sglang_inflight.extensions.refresh.refresh",),
    settings=RefreshSettings,
)
