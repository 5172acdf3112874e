"""Check what this server can do about KV of older weights, in each tier of its cache."""

from __future__ import annotations

import functools
import logging

from sglang_inflight.messages import KVPolicy
from sglang_inflight.sglang_types.runtime_context import get_memory, get_parallel
from sglang_inflight.unsupported import why_no_retraction
from sglang_inflight.vocabulary.errors import Refused

logger = logging.getLogger(__name__)


def why_cache_cannot_be_flushed() -> str | None:
    """Return why later requests may reuse prefixes of older weights, or None if they cannot.

    In a hierarchical cache the host tier shares the device tier's tree and keys, so fence and
    flush reach both. A storage backend has keys of its own. Storage backends may be attached and
    detached while the server runs.
    """
    memory = get_memory()
    if memory.enable_lmcache or memory.enable_flexkv:
        return "LMCache and FlexKV keep prefixes of older weights"
    if not memory.enable_hierarchical_cache:
        return None
    if (store := memory.hicache_storage_backend) is not None:
        return f"--hicache-storage-backend {store} keeps prefixes of older weights"
    if get_parallel().pp_size > 1:
        return "--enable-hierarchical-cache is untested with --pp-size above 1"
    return None


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
