"""Keeps the KV of conversations between their turns, and recomputes it in idle time."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_inflight.extension import Extension
from sglang_inflight.settings import natural, setting

# a field of a request's ``custom_params``: for how long its KV is kept, in seconds
KV_LEASE_S = "kv_lease_s"


def _messages() -> tuple[type, ...]:
    from sglang_inflight.extensions.leases.messages import LeasesOver

    return (LeasesOver,)


@dataclass(frozen=True)
class LeasesSettings:
    kv_lease_tokens: int | None = setting(
        None,
        natural,
        "tokens of cached KV that all kv_lease_s together may keep; the oldest leases end first. "
        "Unset is a quarter of the KV pool",
        is_shared=True,
    )


EXTENSION = Extension(
    name="leases",
    modules=(
        "sglang_inflight.extensions.leases.checks",
        "sglang_inflight.extensions.leases.leases",
    ),
    messages=_messages,
    settings=LeasesSettings,
    takes=(KV_LEASE_S,),
)
