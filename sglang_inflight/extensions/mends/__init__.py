"""Faults of SGLang that requests of in-flight updates, or any requests, meet."""

from __future__ import annotations

from sglang_inflight.extension import Extension

EXTENSION = Extension(
    name="mends",
    modules=(
        "sglang_inflight.extensions.mends.aborted_answers",
        "sglang_inflight.extensions.mends.keys",
        "sglang_inflight.extensions.mends.redaction",
        "sglang_inflight.extensions.mends.sampling",
    ),
)
