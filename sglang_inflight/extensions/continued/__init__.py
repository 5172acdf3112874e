"""Lets a request go on from the output that it has had elsewhere."""

from __future__ import annotations

from sglang_inflight.extension import Extension

# a field of a request's ``custom_params``
OUTPUT_SO_FAR = "output_so_far"

EXTENSION = Extension(
    name="continued",
    modules=(
        "sglang_inflight.extensions.continued.checks",
        "sglang_inflight.extensions.continued.on_rank",
    ),
    takes=(OUTPUT_SO_FAR,),
    offers=("continued",),
)
