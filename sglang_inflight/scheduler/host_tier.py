"""The host-memory tier of a hierarchical cache.

A node of the cache's tree has slots on the device, on the host, or on both. SGLang copies between
the tiers on its own streams, and handles finished copies at its next step. Everything here runs
on the scheduler's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_inflight.sglang_types import get_memory

if TYPE_CHECKING:
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


def engine_of(tree_cache: Any) -> L2TransferEngine | None:
    """Return the engine of copies between the tiers, or None without a host tier."""
    controller = _controller_of(tree_cache)
    return None if controller is None else controller.l2_transfer_engine


def count_host_slots(tree_cache: Any) -> int:
    controller = _controller_of(tree_cache)
    return 0 if controller is None else controller.mem_pool_host.logical_size


def transfers_of_kv(tree_cache: Any, transfers: list[L2Transfer]) -> list[L2Transfer]:
    """Return the transfers of the KV pool.

    A model with sliding windows or states has further pools, with other slots. Their transfers
    may come together with the KV's, or alone.
    """
    controller = _controller_of(tree_cache)
    if controller is None:
        return []
    pool = controller.mem_pool_host
    # without a group of pools ``mem_pool_host`` is the KV pool itself
    anchor = getattr(pool, "anchor_entry", None)
    of_kv = pool if anchor is None else anchor.host_pool
    return [each for each in transfers if each.host_pool is of_kv and not each.is_draft]


def finish_copies(tree_cache: UnifiedRadixCache) -> None:
    """Start all queued copies between the tiers, and wait for all copies, before a flush.

    The wait needs no step and no collective. Afterwards all ranks are at the same boundary
    without copies, so their next collective decision is the same.
    """
    controller = _controller_of(tree_cache)
    if controller is None:
        return
    # prefetches whose batch was never launched
    controller.start_loading()
    tree_cache.loading_check(finish_count=len(controller.ack_load_queue))
    # also starts queued write-backs
    tree_cache.writing_check(write_back=True)


def _controller_of(tree_cache: Any) -> HiCacheController | None:
    if not get_memory().enable_hierarchical_cache:
        return None
    return getattr(tree_cache, "cache_controller", None)
