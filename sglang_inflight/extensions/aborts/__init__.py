"""Aborts by the client's name of a call, and of no other request.

Patch 0008 has the schedulers compare whole names. So without this extension an abort by the name of
a batch ends none of its requests.
"""

from __future__ import annotations

from sglang_inflight.extension import Extension

EXTENSION = Extension(
    name="aborts",
    modules=(
        "sglang_inflight.extensions.aborts.aborts",
        "sglang_inflight.extensions.aborts.hooks",
    ),
)
