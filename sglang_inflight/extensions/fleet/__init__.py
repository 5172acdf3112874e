"""A server that is behind its fleet takes no new requests."""

from __future__ import annotations

from sglang_inflight.extension import Extension

EXTENSION = Extension(
    name="fleet",
    modules=("sglang_inflight.extensions.fleet.fleet_version",),
)
