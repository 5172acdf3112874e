"""Check this server's support of a policy for the KV of older weights."""

from __future__ import annotations

import functools
import logging

from sglang_inflight.errors import Refused
from sglang_inflight.frontend.tiers import why_cache_cannot_be_flushed
from sglang_inflight.messages import KVPolicy
from sglang_inflight.unsupported import why_no_retraction

logger = logging.getLogger(__name__)


def require_supported(kv_cache: KVPolicy, *, retracts: bool) -> None:
    """Raise ``Refused`` if ``kv_cache`` is unsupported.

    ``retracts`` is true if requests may be running at the commit.
    """
    if kv_cache != "keep" and (reason := why_cache_cannot_be_flushed()) is not None:
        raise Refused(f'kv_cache={kv_cache!r} is not supported: {reason}; pass kv_cache="keep"')
    if retracts and kv_cache == "recompute" and (reason := why_no_retraction()) is not None:
        raise Refused(
            'kv_cache="recompute" (flush_cache=true) retracts running requests, which '
            f'this server cannot: {reason}; pass kv_cache="fence" or "keep"'
        )


def as_sglang_does(kv_cache: KVPolicy) -> KVPolicy:
    """Weaken an unsupported policy for calls without our fields, as SGLang does."""
    if kv_cache == "keep" or (reason := why_cache_cannot_be_flushed()) is None:
        return kv_cache
    _warn(reason)
    return "keep" if kv_cache == "fence" else kv_cache


@functools.cache
def _warn(reason: str) -> None:
    """Warn once per reason."""
    logger.warning("Requests may reuse the KV of older weights after updates: %s.", reason)
