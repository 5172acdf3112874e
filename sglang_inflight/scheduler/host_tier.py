"""The second tier of a hierarchical cache, which is memory of the host.

Nodes of the cache's tree have slots on the device, on the host, or both. SGLang copies between
the two on streams of its own, and notices what is done at its next step. Everything here is done
on the scheduler's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_inflight.sglang_types.runtime_context import get_memory

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.pools import (
        HiCacheController,
        L2Transfer,
        L2TransferEngine,
        UnifiedRadixCache,
    )


def engine_of(tree_cache: Any) -> L2TransferEngine | None:
    """Who copies, or None where there is one tier."""
    controller = _controller_of(tree_cache)
    return None if controller is None else controller.l2_transfer_engine


def count_host_slots(tree_cache: Any) -> int:
    controller = _controller_of(tree_cache)
    return 0 if controller is None else controller.mem_pool_host.logical_size


def transfers_of_kv(tree_cache: Any, transfers: list[L2Transfer]) -> list[L2Transfer]:
    """Those to or from slots that requests have.

    A model with windows or states has pools beside that one, whose slots are others. They may be
    copied with it, or alone.
    """
    controller = _controller_of(tree_cache)
    if controller is None:
        return []
    pool = controller.mem_pool_host
    # one that is no group is itself the pool
    anchor = getattr(pool, "anchor_entry", None)
    of_kv = pool if anchor is None else anchor.host_pool
    return [each for each in transfers if each.host_pool is of_kv and not each.is_draft]


def finish_copies(tree_cache: UnifiedRadixCache) -> None:
    """Wait until nothing is on its way between the tiers, as a flush wants it.

    No copy waits for a step: what a step would have started is started here. Ranks that step
    together wait alone, and stand at the same boundary with nothing under way, so what they next
    agree on is the same.
    """
    controller = _controller_of(tree_cache)
    if controller is None:
        return
    # loads of requests that were admitted to a batch which was not made
    controller.start_loading()
    tree_cache.loading_check(finish_count=len(controller.ack_load_queue))
    # starts what is still queued
    tree_cache.writing_check(write_back=True)


def _controller_of(tree_cache: Any) -> HiCacheController | None:
    if not get_memory().enable_hierarchical_cache:
        return None
    return getattr(tree_cache, "cache_controller", None)
