"""Counts the ids of KV slots, for each kind of pool in SGLang.

An allocator's ``size`` may be smaller: the size of the smaller one of two pools, or the part of
shared memory left by other pools.
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
    """Return a bound above each slot id in requests and batches.

    Ids begin after the first page: the first page takes the writes of padding.
    """
    slots, first = allocator.size_full, allocator.page_size
    if isinstance(allocator, UnifiedSWAAllocatorBase | UnifiedMambaTokenToKVPoolAllocator):
        # virtual ids: memory is assigned when an id is handed out
        slots = max(slots, cast("VirtualPoolAllocator", allocator).draft_virtual_id_space)
    if isinstance(allocator, PageInterleavePoolAllocator):
        # the first page of each rank
        first *= cast("ShardedPoolAllocator", allocator).shard_size
    return slots + first
