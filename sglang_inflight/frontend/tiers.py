"""Find tiers of the prefix cache out of reach of flush and fence."""

from __future__ import annotations

from sglang_inflight.sglang_types.runtime_context import get_memory, get_parallel


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
