"""A name passes to another adapter while SGLang loads a third one, with SGLang's own registry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry
from sglang.srt.managers import tokenizer_control_mixin
from sglang.srt.managers.io_struct import (
    LoadLoRAAdapterReqInput,
    LoRAUpdateOutput,
    UnloadLoRAAdapterReqInput,
)
from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin

from sglang_inflight.extensions.adapters import adapters, loading
from sglang_inflight.extensions.adapters.adapters import Adapters
from sglang_inflight.extensions.adapters.loading import load_everywhere
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.bodies import LoadFolderBody
from sglang_inflight.vocabulary.errors import Conflict

MOST = 2
OLD = LoRARef(lora_name="policy", lora_path="/old")
MADE_ROOM = LoRARef(lora_name="b", lora_path="/b")
LOADED = {"policy": "/new", "b": "/b"}


class Manager(TokenizerControlMixin):
    """SGLang's control calls, and one rank. The test sets events to let the rank answer loads."""

    inflight: Any

    def __init__(self) -> None:
        self.lora_update_lock = asyncio.Lock()
        self.pending_lora_unloads: dict[str, str] = {}
        self.lora_registry = LoRARegistry([OLD])
        self.lora_ref_cache = {"policy": OLD, "b": MADE_ROOM}
        self.asyncio_tasks: set[asyncio.Future[Any]] = set()
        self.is_pause = False
        # adapters on the rank, by name; and the rank's name changes
        self.on_rank = {"policy": OLD.lora_id}
        self.renamed: list[dict[str, str]] = []
        self.new_name = ""
        self.new_arrives, self.answers_new = asyncio.Event(), asyncio.Event()
        self.b_arrives, self.answers_b = asyncio.Event(), asyncio.Event()

    def auto_create_handle_loop(self) -> None: ...

    async def load_lora_adapter(self, obj: Any, *args: Any) -> Any:
        manager: Any = self
        return await load_everywhere(TokenizerControlMixin.load_lora_adapter, manager, obj, *args)

    async def update_lora_adapter_communicator(self, obj: Any) -> list[LoRAUpdateOutput]:
        if isinstance(obj, UnloadLoRAAdapterReqInput):
            # under any name
            named = [name for name, lora_id in self.on_rank.items() if lora_id == obj.lora_id]
            for name in named:
                del self.on_rank[name]
        else:
            if obj.lora_name == "b":
                self.b_arrives.set()
                await self.answers_b.wait()
            else:
                self.new_name = obj.lora_name
                self.new_arrives.set()
                await self.answers_new.wait()
            self.on_rank[obj.lora_name] = obj.lora_id
        loaded: dict[str, Any] = dict.fromkeys(self.on_rank, "")
        return [LoRAUpdateOutput(success=True, loaded_adapters=loaded)]

    async def carry_out(self, call: Any, _: float) -> list[Any]:
        """Record a call to the ranks."""
        self.renamed.append(call.names)
        by_id = {lora_id: name for name, lora_id in self.on_rank.items()} | call.names
        self.on_rank = {name: lora_id for lora_id, name in by_id.items()}
        return []


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    lora = SimpleNamespace(enable_lora=True, max_loaded_loras=MOST)
    parallel = SimpleNamespace(dp_size=1, pp_size=1)
    for module in (tokenizer_control_mixin, adapters, loading):
        monkeypatch.setattr(module, "get_lora", lambda: lora)
    for module in (tokenizer_control_mixin, adapters):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)


def _keep(manager: Manager, doing: Coroutine[Any, Any, Any]) -> None:
    manager.asyncio_tasks.add(asyncio.ensure_future(doing))


def run(doing: Callable[[Manager, Adapters], Awaitable[None]]) -> None:
    async def bounded() -> None:
        manager: Any = Manager()
        loads = Adapters(manager, manager, Capabilities(), lambda doing: _keep(manager, doing))
        manager.inflight = SimpleNamespace(part=lambda _: loads)
        async with asyncio.timeout(60):
            await doing(manager, loads)
            await asyncio.gather(*manager.asyncio_tasks)

    asyncio.run(bounded())


def replace(loads: Adapters) -> asyncio.Future[Any]:
    body = LoadFolderBody(lora_name="policy", lora_path="/new", replace=True)
    return asyncio.ensure_future(loads.load(body))


async def let_tasks_run() -> None:
    """Let all tasks run until each waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_eviction_for_a_reload_spares_replacement_adapter() -> None:
    """SGLang evicts the least recently used adapter, and the replacement is unused yet."""

    async def do(manager: Manager, loads: Adapters) -> None:
        load = replace(loads)
        await manager.new_arrives.wait()
        # a request asks for an evicted adapter, and waits for its turn
        again = asyncio.ensure_future(
            manager.load_lora_adapter(LoadLoRAAdapterReqInput(lora_name="b", lora_path="/b"))
        )
        await let_tasks_run()
        manager.answers_new.set()
        await manager.b_arrives.wait()
        # another request looks the name up
        await manager.lora_registry.release(await manager.lora_registry.acquire("policy"))
        manager.answers_b.set()
        answer = await load
        assert (await again).success
        await let_tasks_run()
        named = manager.lora_registry.get_all_adapters()
        assert answer.success
        assert {name: ref.lora_path for name, ref in named.items()} == LOADED
        assert {name: ref.lora_path for name, ref in manager.lora_ref_cache.items()} == LOADED
        # "old" had no request
        assert manager.on_rank == {name: ref.lora_id for name, ref in named.items()}

    run(do)


def test_replace_fails_when_replacement_is_unloaded() -> None:
    """Until the switch the replacement has a temporary name, published by the server."""

    async def do(manager: Manager, loads: Adapters) -> None:
        load = replace(loads)
        await manager.new_arrives.wait()
        request = UnloadLoRAAdapterReqInput(lora_name=manager.new_name)
        anyone: Any = manager
        unloading = asyncio.ensure_future(anyone.unload_lora_adapter(request))
        await let_tasks_run()
        manager.answers_new.set()
        with pytest.raises(Conflict, match="was unloaded"):
            await load
        assert (await unloading).success
        assert manager.renamed == []
        assert manager.on_rank == {"policy": OLD.lora_id}
        assert manager.lora_registry.get_all_adapters() == {"policy": OLD}
        assert set(manager.lora_ref_cache) == {"policy", "b"}

    run(do)
