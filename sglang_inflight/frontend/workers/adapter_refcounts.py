"""Who uses an adapter, where several workers take requests.

Requests look an adapter up in their worker's registry, and are counted there until they end. The
owner loads and unloads, so each worker tells it its counts, and the owner's are the sums. Both
are SGLang's registries, which everything else goes on asking.

An adapter that has lost its name is found by no request of a worker that has heard so, and what
found it before is in the counts that the worker has told by then: they come first on its
connection. So when all workers have heard, the owner's count of it only falls. What a worker
that died had sent runs on and is counted by nobody: ranks refuse to unload an adapter of which
they have requests (``scheduler/lora/adapters.py``).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry
from sglang.srt.utils import ConcurrentCounter

from sglang_inflight.frontend.workers.protocol import Adapter, Uses


def as_sglangs(adapter: Adapter) -> Any:
    return LoRARef(**msgspec.structs.asdict(adapter))


class WorkersRegistry(LoRARegistry):
    """Its adapters are those that the owner says. Lives on the worker's event loop.

    They change between two of SGLang's looks at them, none of which awaits anything.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        """``changed`` is called when ``uses`` may be other than before."""
        super().__init__()
        self._changed = changed
        self._lookups: set[asyncio.Future[None]] = set()

    def replace_all(self, adapters: Iterable[Adapter]) -> None:
        self._registry = OrderedDict((each.lora_name, as_sglangs(each)) for each in adapters)
        for ref in self._registry.values():
            self._counters.setdefault(ref.lora_id, ConcurrentCounter())
        self._forget()

    def uses(self) -> Uses:
        return {name: each.value() for name, each in self._counters.items() if each.value()}

    async def flush_lookups(self) -> None:
        """What has been looked up by now is in ``uses``."""
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
        """Adapters that have no name and no request, unless a lookup is about to count one."""
        if self._lookups:
            return
        named = {ref.lora_id for ref in self._registry.values()}
        for lora_id in [each for each, count in self._counters.items() if not count.value()]:
            if lora_id not in named:
                del self._counters[lora_id]


class OwnersRegistry(LoRARegistry):
    """The one in which adapters are registered. Lives on the owner's event loop."""

    def __init__(self, adapters: list[Any], until_known: Callable[[], Awaitable[None]]) -> None:
        """``until_known`` returns when every worker has heard which adapters there are."""
        super().__init__(adapters)
        self._until_known = until_known

    async def count(self, before: Uses, now: Uses) -> None:
        """A worker used adapters as ``before``, and uses them as ``now``."""
        for lora_id in before.keys() | now.keys():
            more = now.get(lora_id, 0) - before.get(lora_id, 0)
            # none of an adapter that was unloaded under a silent worker
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
        """The one that was used least recently makes room for others."""
        for name, ref in self._registry.items():
            if ref.lora_id == lora_id:
                self._registry.move_to_end(name)
                return
