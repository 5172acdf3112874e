"""Reference counts of adapters, in two workers and in the owner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.utils import ConcurrentCounter

from sglang_inflight.extensions.adapters.moved_requests import count_as_moved
from sglang_inflight.extensions.workers.protocol import Adapter, Uses
from sglang_inflight.extensions.workers.refcounts import (
    OwnersRegistry,
    WorkersRegistry,
    as_sglangs,
)
from tests.support import ticks
from tests.support.ticks import until_idle

OLD = Adapter(lora_id="old", lora_name="policy", lora_path="p", pinned=False)
NEW = Adapter(lora_id="new", lora_name="policy", lora_path="p", pinned=False)
OTHER = Adapter(lora_id="other", lora_name="another", lora_path="q", pinned=False)


def run(doing: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await doing()

    ticks.run(bounded())


def test_adapter_is_counted_until_its_last_request_ends() -> None:
    changes = []

    async def do() -> None:
        registry = WorkersRegistry(lambda: changes.append(registry.uses()))
        registry.replace_all([OLD, OTHER])
        assert await registry.acquire("policy") == "old"
        registry.replace_all([NEW, OTHER])
        assert await registry.acquire(["policy", "another"]) == ["new", "other"]
        assert registry.uses() == {"old": 1, "new": 1, "other": 1}
        await registry.release("old")
        await registry.release(["new", "other"])
        assert changes == [
            {"old": 1},
            {"old": 1, "new": 1, "other": 1},
            {"new": 1, "other": 1},
            {},
        ]
        # unloaded "old" is removed for good; the other two stay
        assert set(registry._counters) == {"new", "other"}

    run(do)


def test_flush_waits_for_uncounted_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup found the adapter, and counts it a turn later."""

    async def do() -> None:
        found, may_count = asyncio.Event(), asyncio.Event()
        increment = ConcurrentCounter.increment

        async def increment_late(counter: ConcurrentCounter, *args: Any, **named: Any) -> None:
            found.set()
            await may_count.wait()
            await increment(counter, *args, **named)

        monkeypatch.setattr(ConcurrentCounter, "increment", increment_late)
        registry = WorkersRegistry(lambda: None)
        registry.replace_all([OLD, OTHER])
        lookup = asyncio.ensure_future(registry.acquire("policy"))
        await found.wait()
        registry.replace_all([NEW, OTHER])
        assert registry.uses() == {}
        flushed = asyncio.ensure_future(registry.flush_lookups())
        await until_idle()
        assert not flushed.done()
        may_count.set()
        await flushed
        assert registry.uses() == {"old": 1}
        assert await lookup == "old"

    run(do)


def test_moved_request_counts_for_a_forgotten_adapter() -> None:
    """This worker had no request of the new adapter and dropped its counter."""

    async def do() -> None:
        registry = WorkersRegistry(lambda: None)
        registry.replace_all([OLD])
        state = SimpleNamespace(
            obj=SimpleNamespace(lora_id=await registry.acquire("policy")), lora_released=False
        )
        registry.replace_all([NEW])
        registry.replace_all([OTHER])
        manager: Any = SimpleNamespace(lora_registry=registry, rid_to_state={"r": state})
        await count_as_moved(manager, ["r", "of another worker"], "old", "new")
        assert registry.uses() == {"new": 1}
        await registry.release(state.obj.lora_id)
        assert registry.uses() == {}
        assert set(registry._counters) == {"other"}

    run(do)


class Owner:
    """An owner whose workers ack when ``acked`` is set."""

    def __init__(self) -> None:
        self.acked = asyncio.Event()
        self.registry = OwnersRegistry([as_sglangs(OTHER), as_sglangs(OLD)], self._wait_acked)

    async def _wait_acked(self) -> None:
        await self.acked.wait()

    def uses(self) -> Uses:
        return {name: each.value() for name, each in self.registry._counters.items()}


def test_owner_sums_counts_of_all_workers() -> None:
    async def do() -> None:
        owner = Owner()
        assert await owner.registry.lru_lora_name() == "another"
        await owner.registry.count({}, {"old": 2, "unloaded": 1})
        await owner.registry.count({}, {"other": 1})
        assert owner.uses() == {"old": 2, "other": 1}
        assert await owner.registry.lru_lora_name() == "policy"
        await owner.registry.count({"old": 2, "unloaded": 1}, {"old": 1})
        await owner.registry.count({"other": 1}, {})
        assert owner.uses() == {"old": 1, "other": 0}

    run(do)


def test_unload_waits_for_last_counts_of_workers() -> None:
    """A worker may count requests of the adapter until its ack."""

    async def do() -> None:
        owner = Owner()
        unloading = asyncio.ensure_future(owner.registry.wait_for_unload("old"))
        await owner.registry.count({}, {"old": 1})
        owner.acked.set()
        await until_idle()
        assert not unloading.done()
        await owner.registry.count({"old": 1}, {})
        await unloading

    run(do)
