"""Where KV is, and whose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sglang_inflight.upstream.describes import describes

if TYPE_CHECKING:
    import torch


@describes("sglang.srt.mem_cache.memory_pool.ReqToTokenPool")
class ReqToTokenPool(Protocol):
    """``req_to_token`` has a row of slots for each request that holds KV."""

    req_to_token: torch.Tensor


@describes("sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator")
class TokenToKVPoolAllocator(Protocol):
    # how many slots there are
    @property
    def size(self) -> int: ...
