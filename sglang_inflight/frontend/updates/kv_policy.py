"""Check what this server can do about KV of older weights, in each tier of its cache."""

from __future__ import annotations

import functools
import logging

from sglang_inflight.capabilities import with_store
from sglang_inflight.messages import KVPolicy
from sglang_inflight.sglang_types import get_memory
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.errors import Refused

logger = logging.getLogger(__name__)


def now(can: Capabilities) -> Capabilities:
    """Return ``can`` with HiCache's store, which SGLang attaches and detaches while it serves."""
    return with_store(can, get_memory())


def require_supported(kv_cache: KVPolicy, can: Capabilities, *, retracts: bool) -> None:
    """Raise ``Refused`` if ``kv_cache`` is unsupported.

    ``retracts`` is true if requests may be running at the commit.
    """
    can = now(can)
    if kv_cache != "keep" and can.fence is not None:
        raise Refused(f"kv_cache={kv_cache!r} is not supported: {can.fence}")
    if retracts and kv_cache == "recompute" and can.recompute is not None:
        raise Refused(can.recompute)


def as_sglang_does(kv_cache: KVPolicy, can: Capabilities) -> KVPolicy:
    """Weaken an unsupported policy for calls without our fields, as SGLang does."""
    if kv_cache == "keep" or (reason := now(can).fence) is None:
        return kv_cache
    _warn(reason)
    return "keep" if kv_cache == "fence" else kv_cache


@functools.cache
def _warn(reason: str) -> None:
    """Warn once per reason."""
    logger.warning("Requests may reuse the KV of older weights after updates: %s.", reason)
