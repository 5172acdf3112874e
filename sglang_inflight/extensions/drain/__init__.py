"""A server that leaves takes no new requests, and hands back those it has by a deadline."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_inflight.extension import Extension
from sglang_inflight.settings import seconds, setting


@dataclass(frozen=True)
class DrainSettings:
    drain_s: float | None = setting(
        None,
        seconds,
        "drain at SIGTERM: requests that still run after this time end with the tokens they have; "
        "unset: they run to their end, as in SGLang",
    )


EXTENSION = Extension(
    name="drain",
    modules=("sglang_inflight.extensions.drain.drain",),
    settings=DrainSettings,
)
