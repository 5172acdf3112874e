"""Pools of KV slots, on the device and on the host, and the caches over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sglang_inflight.sglang_types.describes import describes

if TYPE_CHECKING:
    import torch

    from sglang_inflight.scheduler.sglang_types.req import Req, ReqKvInfo


@describes("sglang.srt.mem_cache.memory_pool.ReqToTokenPool")
class ReqToTokenPool(Protocol):
    """``req_to_token`` has a row of slots for each request that holds KV."""

    req_to_token: torch.Tensor


@describes("sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator")
class TokenToKVPoolAllocator(Protocol):
    # size of an allocated page, perhaps larger than the scheduler's page_size
    page_size: int

    # number of slots for full-attention layers, if counted separately
    @property
    def size_full(self) -> int: ...


@describes(
    "sglang.srt.mem_cache.allocator.unified_hybrid_swa.UnifiedSWAAllocatorBase",
    "sglang.srt.mem_cache.allocator.unified_mamba.UnifiedMambaTokenToKVPoolAllocator",
)
class VirtualPoolAllocator(Protocol):
    """An allocator of virtual slots: a slot's memory may move, and its id stays."""

    # number of slot ids
    @property
    def draft_virtual_id_space(self) -> int: ...


@describes("sglang.srt.mem_cache.allocator.page_interleave.PageInterleavePoolAllocator")
class ShardedPoolAllocator(Protocol):
    """An allocator of pages interleaved over several ranks."""

    # number of ranks
    shard_size: int


@describes("sglang.srt.mem_cache.l2_transfer.L2Transfer")
class L2Transfer(Protocol):
    """A copy from a device pool's slots to host slots, or back."""

    host_pool: Any
    # true for a draft model's KV, in the same slots as its target's
    is_draft: bool
    host_indices: torch.Tensor
    device_indices: torch.Tensor


@describes("sglang.srt.mem_cache.l2_transfer.L2TransferEngine")
class L2TransferEngine(Protocol):
    def submit_device_to_host(self, transfers: list[Any]) -> Any: ...


@describes("sglang.srt.mem_cache.pool_host.group.PoolEntry")
class PoolEntry(Protocol):
    host_pool: Any


@describes("sglang.srt.mem_cache.pool_host.group.HostPoolGroup")
class HostPoolGroup(Protocol):
    # the pool of requests' KV slots, beside pools of sliding windows and of states
    anchor_entry: PoolEntry
    # number of slots, of all ranks with interleaved pages
    logical_size: int


@describes("sglang.srt.managers.cache_controller.HiCacheController")
class HiCacheController(Protocol):
    l2_transfer_engine: L2TransferEngine
    mem_pool_host: HostPoolGroup
    ack_load_queue: list[Any]

    def start_loading(self) -> int: ...


@describes("sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache")
class PrefixCache(Protocol):
    # KV kept by streaming sessions for their next turn, or lent to a turn, by session id
    def session_records(self) -> dict[str, ReqKvInfo]: ...
    def release_session(self, session_id: str) -> None: ...


@describes("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache")
class UnifiedRadixCache(PrefixCache, Protocol):
    req_to_token_pool: ReqToTokenPool
    # None without a tier on the host
    cache_controller: HiCacheController | None

    def writing_check(self, write_back: bool = False, finish_count: int | None = None) -> None: ...
    def loading_check(self, finish_count: int | None = None) -> None: ...


@describes("sglang.srt.session.streaming_session.SessionSlot")
class SessionSlot(Protocol):
    """The KV of one session, kept for its next request or lent to one."""

    # keeps the KV's prefix in the cache
    lock: Any | None


@describes("sglang.srt.session.streaming_session.StreamingSession")
class StreamingSession(Protocol):
    """All streaming sessions of a server. Each keeps its KV between two requests."""

    cache: UnifiedRadixCache
    # by session id
    slots: dict[str, Any]

    # slot of the session that lends its KV to the request
    def borrowed_slot(self, req: Req) -> SessionSlot | None: ...
