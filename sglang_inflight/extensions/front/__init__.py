"""A proxy in front of a fleet: one address, whose rollouts outlive their servers."""

from __future__ import annotations

from sglang_inflight.extension import Extension

EXTENSION = Extension(
    name="front",
    modules=(),
    commands={"front": "sglang_inflight.extensions.front.command:front"},
)
