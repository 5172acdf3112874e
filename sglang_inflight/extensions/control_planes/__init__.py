"""One short answer for the lists of gateways: what a server is, serves and can do."""

from __future__ import annotations

from sglang_inflight.extension import Extension

EXTENSION = Extension(
    name="control_planes",
    modules=("sglang_inflight.extensions.control_planes.entry",),
)
