"""Servers whose schedulers are Ray's actors (``--use-ray``, ``RayEngine``)."""

from __future__ import annotations

from sglang_inflight.extension import Extension

EXTENSION = Extension(
    name="ray",
    late_modules={"sglang.srt.ray.engine": "sglang_inflight.extensions.ray.hooks"},
    library="ray",
    requires=("nodes",),
    serves=("use_ray",),
)
