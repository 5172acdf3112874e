"""Lets a request go on from the output that it has had elsewhere."""

from __future__ import annotations

from sglang_inflight.extension import Extension
from sglang_inflight.vocabulary.so_far import OUTPUT_SO_FAR

EXTENSION = Extension(
    name="continued",
    modules=(
        "sglang_inflight.extensions.continued.checks",
        "sglang_inflight.extensions.continued.on_rank",
    ),
    takes=(OUTPUT_SO_FAR,),
    offers=("continued",),
)
