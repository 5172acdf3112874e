"""What this server can do about the KV of older weights."""

from __future__ import annotations

from sglang_inflight.errors import Refused
from sglang_inflight.messages import KVPolicy
from sglang_inflight.unsupported import why_no_pause
from sglang_inflight.upstream.runtime_context import get_memory


def require_supported(kv_cache: KVPolicy, *, retracts: bool) -> None:
    """Raises ``Refused``. ``retracts`` where requests may be running at the commit."""
    if get_memory().enable_hierarchical_cache and kv_cache != "keep":
        raise Refused(
            f"kv_cache={kv_cache!r} is not supported with --enable-hierarchical-cache: its "
            'lower tiers keep prefixes of older weights; pass kv_cache="keep"'
        )
    if retracts and kv_cache == "recompute" and (reason := why_no_pause()) is not None:
        raise Refused(
            'kv_cache="recompute" (flush_cache=true) retracts running requests, as a pause '
            f'does: {reason}; pass kv_cache="fence" or "keep"'
        )
