"""An extension for the tests: it counts what a rank queues and launches, and answers by a route."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_inflight.extension import Extension
from sglang_inflight.settings import boolean, read, setting


@dataclass(frozen=True)
class InventedSettings:
    invented: bool = setting(False, boolean, "count queued requests and launched forwards")


EXTENSION = Extension(
    name="invented",
    modules=("inflight_invented.front_end", "inflight_invented.on_rank"),
    settings=InventedSettings,
    is_on=lambda: read(InventedSettings).invented,
)
