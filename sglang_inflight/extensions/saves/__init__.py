"""Served weights, saved or offered by one server and loaded by another of the same layout."""

from __future__ import annotations

from sglang_inflight.extension import Extension

EXTENSION = Extension(
    name="saves",
    modules=(
        "sglang_inflight.extensions.saves.front_end",
        "sglang_inflight.extensions.saves.loading",
        "sglang_inflight.extensions.saves.offering",
        "sglang_inflight.extensions.saves.offers",
        "sglang_inflight.extensions.saves.saving",
    ),
)
