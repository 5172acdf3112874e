"""Where KV is, and whose."""

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
    # of pages as it hands them out, which may be larger than the scheduler's
    page_size: int

    # how many slots there are for layers that attend to all tokens, if it counts those apart
    @property
    def size_full(self) -> int: ...


@describes(
    "sglang.srt.mem_cache.allocator.unified_hybrid_swa.UnifiedSWAAllocatorBase",
    "sglang.srt.mem_cache.allocator.unified_mamba.UnifiedMambaTokenToKVPoolAllocator",
)
class VirtualPoolAllocator(Protocol):
    """Of slots whose memory may move, so that their ids do not say where it is."""

    # how many ids there are
    @property
    def draft_virtual_id_space(self) -> int: ...


@describes("sglang.srt.mem_cache.allocator.page_interleave.PageInterleavePoolAllocator")
class ShardedPoolAllocator(Protocol):
    """Of pages that ranks have turn about."""

    # ranks
    shard_size: int


@describes("sglang.srt.mem_cache.l2_transfer.L2Transfer")
class L2Transfer(Protocol):
    """Of what a pool on a device has to slots on the host, or back."""

    host_pool: Any
    # of a draft model, which has the slots of its target
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
    # the pool whose slots requests have. Others go with it: of windows, and of states
    anchor_entry: PoolEntry
    # slots, those of all ranks that have their pages turn about
    logical_size: int


@describes("sglang.srt.managers.cache_controller.HiCacheController")
class HiCacheController(Protocol):
    l2_transfer_engine: L2TransferEngine
    mem_pool_host: HostPoolGroup
    ack_load_queue: list[Any]

    def start_loading(self) -> int: ...


@describes("sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache")
class PrefixCache(Protocol):
    # what streaming sessions keep for their next turn, or lend to one, by their ids
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
    """The KV that one session keeps for its next request, or lends to one."""

    # holds the KV's prefix in the cache
    lock: Any | None


@describes("sglang.srt.session.streaming_session.StreamingSession")
class StreamingSession(Protocol):
    """All such sessions of a server, each of which keeps its KV between two requests."""

    cache: UnifiedRadixCache
    # by the sessions' ids
    slots: dict[str, Any]

    # of the session that lends its KV to the request
    def borrowed_slot(self, req: Req) -> SessionSlot | None: ...
