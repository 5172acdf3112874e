"""How far the ids of KV slots go, of any pool that SGLang has.

An allocator's ``size`` does not say: it may be of the smaller one of two pools, or what other
pools leave of memory that they share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from sglang.srt.mem_cache.allocator.page_interleave import PageInterleavePoolAllocator
from sglang.srt.mem_cache.allocator.unified_hybrid_swa import UnifiedSWAAllocatorBase
from sglang.srt.mem_cache.allocator.unified_mamba import UnifiedMambaTokenToKVPoolAllocator

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.pools import (
        ShardedPoolAllocator,
        TokenToKVPoolAllocator,
        VirtualPoolAllocator,
    )


def count_slots(allocator: TokenToKVPoolAllocator) -> int:
    """Each id that requests and batches have is below this.

    Ids begin after the first page, which takes what padding writes.
    """
    slots, first = allocator.size_full, allocator.page_size
    if isinstance(allocator, UnifiedSWAAllocatorBase | UnifiedMambaTokenToKVPoolAllocator):
        # ids of slots that memory is found for when they are handed out
        slots = max(slots, cast("VirtualPoolAllocator", allocator).draft_virtual_id_space)
    if isinstance(allocator, PageInterleavePoolAllocator):
        # the first page of each rank
        first *= cast("ShardedPoolAllocator", allocator).shard_size
    return slots + first
