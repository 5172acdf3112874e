"""A version goes to the host tier with its KV, and with no other copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry

from sglang_inflight.plugin import every_hook
from sglang_inflight.scheduler import host_tier
from sglang_inflight.scheduler.controller import Controller

NONE, SLOTS, WINDOW = torch.tensor([]), torch.tensor([1, 2]), torch.tensor([70, 80])


class Recorder:
    """A stand-in for the KV versions, recording the slots copied."""

    def __init__(self) -> None:
        self.copies: list[tuple[str, list[int]]] = []

    def follow_to_host(self, host_slots: torch.Tensor, slots: torch.Tensor) -> None:
        self.copies.append(("to", slots.tolist()))

    def follow_from_host(self, host_slots: torch.Tensor, slots: torch.Tensor) -> None:
        self.copies.append(("from", slots.tolist()))


def pool() -> Any:
    return SimpleNamespace(
        layout="layer_first", page_size=1, device="cpu", size=100, logical_size=100,
        can_use_write_back_jit=False,
    )  # fmt: skip


def entry(name: PoolName, *, is_anchor: bool) -> PoolEntry:
    device_pool: Any = SimpleNamespace()
    return PoolEntry(
        name, pool(), device_pool, lambda layer: layer, is_primary_index_anchor=is_anchor,
        packed_draft_device_pools=(SimpleNamespace(),) if is_anchor else (),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kv", "window"), [(SLOTS, None), (SLOTS, WINDOW), (NONE, WINDOW)], ids=["kv", "both", "window"]
)
def test_versions_follow_only_kv_to_host_tier(
    monkeypatch: pytest.MonkeyPatch, kv: torch.Tensor, window: torch.Tensor | None
) -> None:
    monkeypatch.setattr(
        host_tier, "get_memory", lambda: SimpleNamespace(enable_hierarchical_cache=True)
    )
    group = HostPoolGroup(
        [entry(PoolName.SWA, is_anchor=False), entry(PoolName.KV, is_anchor=True)]
    )
    copier: Any = HybridCacheController.__new__(HybridCacheController)
    copier.mem_pool_host, copier.transfer_layer_id_max = group, 2
    controller = Controller.__new__(Controller)
    cache: Any = SimpleNamespace(cache_controller=copier)
    any_controller: Any = controller
    any_controller.scheduler = SimpleNamespace(tree_cache=cache)
    any_controller.kv_versions = recorder = Recorder()
    engine: Any = SimpleNamespace(inflight=controller)
    pools = [] if window is None else [PoolTransfer(PoolName.SWA, window, window)]
    called = {target.rpartition(".")[2]: function for target, function, _ in every_hook()}
    for follow, transfers in (
        (called["submit_device_to_host"], copier._l2_transfers(kv, kv, pools)),
        (called["submit_host_to_device"], copier._l2_load_transfers(kv, kv, pools)),
    ):
        follow(engine, transfers)
        # before the controller is there
        follow(SimpleNamespace(), transfers)
    slots = kv.tolist()
    assert recorder.copies == ([("to", slots), ("from", slots)] if slots else [])
