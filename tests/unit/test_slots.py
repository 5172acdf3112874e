"""Every id of SGLang's own KV slot allocators has a version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.allocator.hisparse import (
    DeepSeekV4HiSparseTokenToKVPoolAllocator,
    HiSparseTokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.allocator.page_interleave import PageInterleavePoolAllocator
from sglang.srt.mem_cache.allocator.swa import (
    PureSWATokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.allocator.unified_hybrid_swa import (
    UnifiedMambaSWATokenToKVPoolAllocator,
    UnifiedSWAAllocatorBase,
    UnifiedSWATokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.allocator.unified_mamba import UnifiedMambaTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.unified_sub_pool import MultiEndedAllocator
from sglang.srt.mem_cache.deepseek_v4_memory_pool import (
    DeepSeekV4TokenToKVPool,
    HiSparseC4DevicePool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_memory_pool import (
    MambaSubPoolSpec,
    MHASubPoolSpec,
    SubPoolSpec,
    UnifiedKVPool,
    UnifiedSWAKVPool,
)
from sglang.srt.runtime_context import get_parallel

from sglang_inflight.scheduler import host_tier
from sglang_inflight.scheduler.versions.kv_versions import count_slots

# SLOTS is no whole number of pages. A pool of other layers has FEW slots.
SLOTS, FEW, PAGE = 75, 32, 16
ANY: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "device": "cpu",
    "need_sort": False,
}
NO_CACHE: Any = None


@pytest.fixture(autouse=True)
def sharded() -> Iterator[None]:
    """With decode context parallelism two ranks share a pool, and tokens alternate between them."""
    with get_parallel().override(attn_dcp_size=2):
        yield


def token() -> Any:
    return TokenToKVPoolAllocator(SLOTS, kvcache=NO_CACHE, **ANY)


def paged() -> Any:
    return PagedTokenToKVPoolAllocator(SLOTS, PAGE, kvcache=NO_CACHE, **ANY)


def interleaved() -> Any:
    return PageInterleavePoolAllocator(SLOTS, PAGE, 4, kvcache=NO_CACHE, **ANY)


def swa_pool(page: int) -> Any:
    return SWAKVPool(
        SLOTS, FEW, page, torch.bfloat16, head_num=1, head_dim=16, device="cpu",
        full_attention_layer_ids=[0], swa_attention_layer_ids=[1],
    )  # fmt: skip


def swa() -> Any:
    return SWATokenToKVPoolAllocator(SLOTS, FEW, 1, kvcache=swa_pool(1), **ANY)


def paged_swa() -> Any:
    return SWATokenToKVPoolAllocator(SLOTS, FEW, PAGE, kvcache=swa_pool(PAGE), **ANY)


def pure_swa() -> Any:
    return PureSWATokenToKVPoolAllocator(SLOTS, 1, kvcache=swa_pool(1), **ANY)


def hisparse() -> Any:
    pool: Any = SimpleNamespace(register_mapping=lambda mapping: None)
    return HiSparseTokenToKVPoolAllocator(SLOTS, PAGE, kvcache=pool, **ANY)


def deepseek_hisparse() -> Any:
    """Build the allocator with only the pool attributes it reads. The real pools need CUDA."""
    pool, part = object.__new__(DeepSeekV4TokenToKVPool), object.__new__(HiSparseC4DevicePool)
    part.size, part.page_size, part.dtype, part.device = FEW, PAGE // 4, torch.bfloat16, "cpu"
    pool.c4_kv_pool, pool.c4_logical_size = part, FEW
    logical = paged_swa()
    logical._kvcache = pool
    return DeepSeekV4HiSparseTokenToKVPoolAllocator(logical)


def attention(name: str, grow: str) -> SubPoolSpec:
    return MHASubPoolSpec(
        name=name, grow_direction=grow, layer_num=1, head_num=1, head_dim=16,
        store_dtype=torch.bfloat16,
    )  # fmt: skip


MAMBA = MambaSubPoolSpec(
    name="mamba", grow_direction="up", layer_num=1, conv_state_shapes=((4, 4),),
    conv_dtype=torch.bfloat16, temporal_state_shape=(4, 4), temporal_dtype=torch.bfloat16,
)  # fmt: skip


def memory(page: int, *parts: SubPoolSpec) -> Any:
    """Build the memory shared by ``parts``."""
    return UnifiedKVPool(
        total_bytes=SLOTS * sum(part.entry_bytes() for part in parts),
        sub_pool_specs=[*parts], device="cpu", enable_memory_saver=False, page_size=page,
    )  # fmt: skip


def shared(page: int, buffer: Any) -> dict[str, Any]:
    pool = UnifiedSWAKVPool(
        unified_buffer=buffer, full_attention_layer_ids=[0], swa_attention_layer_ids=[1],
        page_size=page, start_layer=0, end_layer=2, enable_memory_saver=False,
    )  # fmt: skip
    return {"unified_buffer": buffer, "kvcache": pool, "page_size": page, "device": "cpu"}


def unified_swa(page: int = PAGE, **limits: Any) -> Any:
    buffer = memory(page, attention("full", "down"), attention("swa", "up"))
    return UnifiedSWATokenToKVPoolAllocator(**shared(page, buffer), **limits)


def limited_unified_swa() -> Any:
    return unified_swa(1, full_max_total_num_tokens=FEW, swa_max_total_num_tokens=FEW)


def unified_mamba() -> Any:
    buffer = memory(PAGE, attention("full", "down"), MAMBA)
    parts: Any = SimpleNamespace(full_kv_pool=SimpleNamespace(), mamba_pool=SimpleNamespace())
    return UnifiedMambaTokenToKVPoolAllocator(
        unified_buffer=buffer, kvcache=parts, device="cpu", page_size=PAGE
    )


def unified_mamba_swa() -> Any:
    parts = attention("full", "down"), attention("swa", "float"), MAMBA
    return UnifiedMambaSWATokenToKVPoolAllocator(
        **shared(PAGE, memory(PAGE, *parts)), mamba_kvcache=SimpleNamespace(),
        full_max_total_num_tokens=FEW, swa_max_total_num_tokens=FEW,
    )  # fmt: skip


ALLOCATORS: list[Callable[[], Any]] = [
    token, paged, interleaved, swa, paged_swa, pure_swa, hisparse, deepseek_hisparse,
    unified_swa, limited_unified_swa, unified_mamba, unified_mamba_swa,
]  # fmt: skip


def all_ids(allocator: Any) -> torch.Tensor:
    """Return every id, or the last id of every page."""
    for owner in ("full_attn_allocator", "logical_attn_allocator"):
        if hasattr(allocator, owner):
            return all_ids(getattr(allocator, owner))
    if isinstance(allocator, PageInterleavePoolAllocator):
        pages: torch.Tensor = allocator.get_all_free_pages()
        return pages * allocator.page_size + allocator.page_size - 1
    if isinstance(allocator, MultiEndedAllocator):
        ids: torch.Tensor = allocator._expand_pages_to_tokens(allocator.free_virtual_ids)
    else:
        ids = allocator.alloc(allocator.available_size())
        assert allocator.available_size() == 0
    return ids


@pytest.mark.parametrize("make", ALLOCATORS)
def test_every_slot_id_has_a_version(make: Callable[[], Any]) -> None:
    allocator = make()
    assert int(all_ids(allocator).max()) < count_slots(allocator)


def test_every_sglang_allocator_is_tested() -> None:
    """Another SGLang may have further allocators with higher ids."""
    # parts and bases of other allocators
    no_whole = {MultiEndedAllocator, *kinds_of(MultiEndedAllocator), UnifiedSWAAllocatorBase}
    kinds = {kind for kind in kinds_of(BaseTokenToKVPoolAllocator) if ".mem_cache." in str(kind)}
    assert kinds - no_whole == {type(make()) for make in ALLOCATORS}


def test_every_host_slot_id_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool shared by ranks: ``size`` is one rank's part."""
    # not in 0.5.22
    module = pytest.importorskip("sglang.srt.mem_cache.pool_host.page_interleave")
    part: Any = SimpleNamespace(size=5 * PAGE, page_size=PAGE, lock=threading.RLock())
    spec = SimpleNamespace(page_size=PAGE, shard_rank=0, shard_size=2)
    pool = module.PageInterleaveHostPool(part, SimpleNamespace(spec=spec))
    cache = SimpleNamespace(cache_controller=SimpleNamespace(mem_pool_host=pool))
    monkeypatch.setattr(
        host_tier, "get_memory", lambda: SimpleNamespace(enable_hierarchical_cache=True)
    )
    ids = pool.alloc(pool.available_size(), start_owner=0)
    assert int(ids.max()) < host_tier.count_host_slots(cache)


def kinds_of(cls: type) -> set[type]:
    found: list[type] = cls.__subclasses__()
    return {*found, *(kind for each in found for kind in kinds_of(each))}
