"""Rows that forwards captured for a request's tokens, kept across retractions."""

from __future__ import annotations

from sglang_inflight.extension import Extension

EXTENSION = Extension(
    name="records",
    modules=(
        "sglang_inflight.extensions.records.captured",
        "sglang_inflight.extensions.records.checks",
    ),
    answers=("records",),
)
