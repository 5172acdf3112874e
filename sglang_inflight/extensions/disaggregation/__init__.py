"""A prefill server and a decode server: versions go with the KV, and pauses meet transfers."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_inflight.extension import Extension
from sglang_inflight.settings import one_of, setting


@dataclass(frozen=True)
class DisaggregationSettings:
    pd_mismatch: str = setting(
        "keep",
        one_of("keep", "abort"),
        "a decode server's treatment of a request from a prefill server with another version: "
        "keep shows both versions in its spans; abort ends it with 503",
        is_shared=True,
    )


EXTENSION = Extension(
    name="disaggregation",
    modules=(
        "sglang_inflight.extensions.disaggregation.handover",
        "sglang_inflight.extensions.disaggregation.pause",
    ),
    settings=DisaggregationSettings,
    serves=("disaggregation_mode",),
    requires=("contracts",),
)
