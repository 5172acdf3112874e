"""Version contracts: which weights make a request's first token, and how old its tokens get."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_inflight.extension import Extension
from sglang_inflight.settings import natural, seconds, setting
from sglang_inflight.vocabulary.contracts import FIELDS, MAX_VERSION_LAG, WEIGHT_VERSION


@dataclass(frozen=True)
class ContractsSettings:
    max_version_lag: int | None = setting(
        None,
        natural,
        "end a request when its first token is more commits behind than this",
        is_shared=True,
    )
    version_timeout_s: float = setting(
        30.0,
        seconds,
        "how long a request waits for the version it asks for, if it does not say so itself, in "
        "seconds; then it ends with 503",
    )


EXTENSION = Extension(
    name="contracts",
    modules=(
        "sglang_inflight.extensions.contracts.checks",
        "sglang_inflight.extensions.contracts.on_rank",
        "sglang_inflight.extensions.contracts.staleness",
        "sglang_inflight.extensions.contracts.version_waits",
    ),
    settings=ContractsSettings,
    takes=(*(name for name in FIELDS if name != WEIGHT_VERSION), MAX_VERSION_LAG),
)
