"""Clients of SGLang's own pauses get updates in flight, without a change of theirs."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_inflight.extension import Extension
from sglang_inflight.settings import boolean, positive, read, setting


@dataclass(frozen=True)
class TransparentSettings:
    transparent: bool = setting(
        False,
        boolean,
        "do not stop generation between pause_generation and continue_generation: commit the "
        "weights sent meanwhile in flight",
    )
    transparent_grace_s: float = setting(
        30.0,
        positive,
        "seconds without an update after which such a pause becomes a real one",
    )


EXTENSION = Extension(
    name="transparent",
    modules=("sglang_inflight.extensions.transparent.windows",),
    settings=TransparentSettings,
    is_on=lambda: read(TransparentSettings).transparent,
)
