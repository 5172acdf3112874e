"""SGLang's span of a request's tokens with one version."""

from __future__ import annotations

from typing import Protocol

from sglang_inflight.sglang_types.describes import describes


@describes("sglang.srt.utils.weight_versions.WeightVersionSpan")
class WeightVersionSpan(Protocol):
    version: str
    start: int
    end: int
