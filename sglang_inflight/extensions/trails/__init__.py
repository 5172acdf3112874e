"""Writes down what happened to a request, so that it can be made again."""

from __future__ import annotations

from sglang_inflight.extension import Extension

# a field of a request's ``custom_params``, and its only value
RECORD, REPLAY = "record", "replay"

EXTENSION = Extension(
    name="trails",
    modules=(
        "sglang_inflight.extensions.trails.checks",
        "sglang_inflight.extensions.trails.trails",
    ),
    takes=(RECORD,),
    # a field of ``meta_info``, too
    answers=(REPLAY,),
)
