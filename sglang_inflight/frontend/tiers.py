"""Tiers of the prefix cache that neither a flush nor the fence reaches."""

from __future__ import annotations

from sglang_inflight.sglang_types.runtime_context import get_memory, get_parallel


def why_cache_cannot_be_flushed() -> str | None:
    """Why prefixes of older weights cannot be kept from later requests, or None where they can.

    The host's tier of a hierarchical cache is in the same tree, and under the same keys, as the
    device's: what the fence hides of the one is hidden of both, and a flush empties both. A store
    behind it has keys of its own. One may be attached and detached while the server runs.
    """
    memory = get_memory()
    if memory.enable_lmcache or memory.enable_flexkv:
        return "LMCache and FlexKV keep prefixes of older weights"
    if not memory.enable_hierarchical_cache:
        return None
    if (store := memory.hicache_storage_backend) is not None:
        return f"--hicache-storage-backend {store} keeps prefixes of older weights"
    if get_parallel().pp_size > 1:
        return "nobody has tried --enable-hierarchical-cache with --pp-size above 1"
    return None
