"""SGLang's registry of adapters, with the number of requests of each."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from sglang_inflight.sglang_types.describes import describes


@describes("sglang.srt.utils.aio_rwlock.RWLock")
class RWLock(Protocol):
    _cond: asyncio.Condition

    async def acquire_writer(self) -> None: ...
    async def release_writer(self) -> None: ...
    @property
    def writer_lock(self) -> AbstractAsyncContextManager[None]: ...


@describes("sglang.srt.utils.common.ConcurrentCounter")
class ConcurrentCounter(Protocol):
    def value(self) -> int: ...
    async def increment(self, n: int = 1, notify_all: bool = True) -> None: ...
    async def decrement(self, n: int = 1, notify_all: bool = True) -> None: ...
    async def wait_for_zero(self) -> None: ...


@describes("sglang.srt.lora.lora_registry.LoRARef")
class LoRARef(Protocol):
    lora_id: str
    lora_name: str | None
    lora_path: str | None


@describes("sglang.srt.managers.io_struct.LoRAUpdateOutput")
class AdapterAnswer(Protocol):
    """Answer to loading and unloading an adapter."""

    success: bool
    error_message: str | None
    loaded_adapters: dict[str, Any] | None


@describes("sglang.srt.lora.lora_registry.LoRARegistry")
class LoRARegistry(Protocol):
    # adapter's id -> counter of requests
    _counters: dict[str, ConcurrentCounter]
    # name -> adapter, the most recently used last
    _registry: OrderedDict[str, Any]
    _registry_lock: RWLock

    async def lru_lora_name(self, exclude_pinned: bool = False) -> str | None: ...
    async def unregister(self, lora_name: str) -> str: ...
    def get_all_adapters(self) -> dict[str, LoRARef]: ...
