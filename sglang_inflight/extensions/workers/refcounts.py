"""Count adapters' requests, so that an adapter is unloaded after its last request.

Each process counts its own requests. A request looks its adapter up in its worker's registry, and
is counted there until it ends. With several tokenizer workers the owner loads and unloads adapters,
so each worker sends its counts, and the owner adds them up. Both registries are SGLang's, so all
other code goes on using them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry
from sglang.srt.utils import ConcurrentCounter

from sglang_inflight.extensions.workers.protocol import Adapter, Uses


def as_sglangs(adapter: Adapter) -> Any:
    return LoRARef(**msgspec.structs.asdict(adapter))


class WorkersRegistry(LoRARegistry):
    """A worker's copy of the owner's adapters. Lives on the worker's event loop.

    SGLang reads the registry without an await, so no reader sees it change midway.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        """Create a registry. ``changed`` is called when ``uses`` may have changed."""
        super().__init__()
        self._changed = changed
        self._lookups: set[asyncio.Future[None]] = set()

    def replace_all(self, adapters: Iterable[Adapter]) -> None:
        registry: Any = OrderedDict((each.lora_name, as_sglangs(each)) for each in adapters)
        self._registry = registry
        for ref in self._registry.values():
            self._counters.setdefault(ref.lora_id, ConcurrentCounter())
        self._forget()

    def uses(self) -> Uses:
        return {name: each.value() for name, each in self._counters.items() if each.value()}

    async def flush_lookups(self) -> None:
        """Wait until ``uses`` includes all lookups started so far."""
        if self._lookups:
            await asyncio.wait(set(self._lookups))

    async def acquire(self, lora_name: str | list[str]) -> str | list[str]:
        lookup = asyncio.get_running_loop().create_future()
        self._lookups.add(lookup)
        try:
            found: str | list[str] = await super().acquire(lora_name)
            return found
        finally:
            self._lookups.discard(lookup)
            lookup.set_result(None)
            self._changed()

    async def release(self, lora_id: str | list[str]) -> None:
        await super().release(lora_id)
        self._forget()
        self._changed()

    def _forget(self) -> None:
        """Forget adapters without a name and without requests, unless a lookup is in progress."""
        if self._lookups:
            return
        named = {ref.lora_id for ref in self._registry.values()}
        for lora_id in [each for each, count in self._counters.items() if not count.value()]:
            if lora_id not in named:
                del self._counters[lora_id]


class OwnersRegistry(LoRARegistry):
    """The registry for loading and unloading. Lives on the owner's event loop."""

    def __init__(self, adapters: list[Any], until_known: Callable[[], Awaitable[None]]) -> None:
        """Create a registry. ``until_known`` returns when every worker has acked the adapters."""
        super().__init__(adapters)
        self._until_known = until_known

    async def count(self, before: Uses, now: Uses) -> None:
        """Replace a worker's counts ``before`` by its counts ``now``."""
        for lora_id in before.keys() | now.keys():
            more = now.get(lora_id, 0) - before.get(lora_id, 0)
            # None if the adapter was unloaded while the worker was silent
            counter = self._counters.get(lora_id)
            if counter is None:
                continue
            if more > 0:
                await counter.increment(more)
                self._touch(lora_id)
            elif more < 0:
                await counter.decrement(-more)

    async def wait_for_unload(self, lora_id: str) -> None:
        await self._until_known()
        await super().wait_for_unload(lora_id)

    def _touch(self, lora_id: str) -> None:
        """Move an adapter to the end: SGLang evicts the least recently used one first."""
        for name, ref in self._registry.items():
            if ref.lora_id == lora_id:
                self._registry.move_to_end(name)
                return
