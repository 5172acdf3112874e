"""Requests pinned to the served version or to the previous one, and turns of the two versions."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_inflight.extension import Extension
from sglang_inflight.settings import counted, seconds, setting
from sglang_inflight.vocabulary.contracts import WEIGHT_VERSION


@dataclass(frozen=True)
class PinsSettings:
    previous_every: int = setting(
        4,
        counted,
        "requests pinned to the previous version get at most every k-th step of a busy server",
        is_shared=True,
    )
    previous_grace_s: float = setting(
        0.0,
        seconds,
        "how long an update waits, before it is staged over the previous version, for requests "
        "pinned to that version",
    )


EXTENSION = Extension(
    name="pins",
    modules=(
        "sglang_inflight.extensions.pins.checks",
        "sglang_inflight.extensions.pins.grace",
        "sglang_inflight.extensions.pins.turns",
    ),
    settings=PinsSettings,
    takes=(WEIGHT_VERSION,),
    offers=("pin",),
)
