"""Check a request's ``max_version_lag`` before the request is accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_inflight.inactive import why_inactive
from sglang_inflight.messages import MAX_VERSION_LAG

if TYPE_CHECKING:
    from sglang_inflight.sglang_types.sampling_params import SamplingParams


def check_max_version_lag(params: SamplingParams, *args: Any) -> None:
    """Raise ``ValueError`` (a 400 over HTTP) for a value that is no whole number, 0 or more.

    Raise also if this server runs without us: no scheduler would enforce the limit.
    """
    custom = params.custom_params
    most = custom.get(MAX_VERSION_LAG) if isinstance(custom, dict) else None
    if most is not None and (why := why_inactive()) is not None:
        raise ValueError(f"custom_params.{MAX_VERSION_LAG}: {why}")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
        raise ValueError(
            f"custom_params.{MAX_VERSION_LAG} must be a whole number, 0 or more; got {most!r}"
        )
