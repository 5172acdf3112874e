"""Adapters that requests use while generation is paused.

Upstream unloads an adapter when the last request that uses it has ended, and until then no
other adapter can be loaded. In a pause no request ends, and a trainer that pauses in order
to change its adapter waits for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from sglang_inflight.errors import Conflict
from sglang_inflight.messages import ADAPTER_IN_USE
from sglang_inflight.sglang_types.runtime_context import get_lora

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager
    from sglang_inflight.sglang_types.requests import UnloadAdapterRequest

# How often an unloading that waits for requests looks whether somebody paused them.
LOOK_S = 0.2

Unload = Callable[..., Awaitable[Any]]


async def refuse_to_unload_in_a_pause(
    unload: Unload, tm: PatchedTokenizerManager, obj: UnloadAdapterRequest, *args: Any
) -> Any:
    """Around the call of a user. Raises ``Conflict`` before anything is changed.

    It does not wait for its turn behind others that load and unload: one of them may be
    what waits.
    """
    tm.inflight.require_owner()
    if tm.is_pause and _users(tm, obj.lora_name):
        # an older pause may be over
        await tm.inflight.pauses.ask_status()
        if tm.is_pause and (users := _users(tm, obj.lora_name)):
            raise Conflict(_say(obj.lora_name, users))
    return await unload(tm, obj, *args)


async def stop_unloading_in_a_pause(
    unload: Unload, tm: PatchedTokenizerManager, obj: UnloadAdapterRequest
) -> Any:
    """Around what holds the lock of adapters, also to make room for one that is loaded.

    As long as requests use the adapter nothing is sent to the schedulers, so the waiting
    can be given up. Upstream answers a ``ValueError`` with its message, takes no new
    request for the adapter, and lets the unloading be asked for again. So does a rank that has
    requests of which nobody here knows any more: their worker has died.
    """
    unloading = asyncio.ensure_future(_unload_when_ranks_let(unload, tm, obj))
    try:
        while not unloading.done():
            await asyncio.wait({unloading}, timeout=LOOK_S)
            if tm.is_pause and not unloading.done() and (users := _users(tm, obj.lora_name)):
                raise ValueError(_say(obj.lora_name, users))
        return await unloading
    finally:
        unloading.cancel()
        await asyncio.wait({unloading})


async def _unload_when_ranks_let(
    unload: Unload, tm: PatchedTokenizerManager, obj: UnloadAdapterRequest
) -> Any:
    while True:
        result = await unload(tm, obj)
        if result.success or ADAPTER_IN_USE not in (result.error_message or ""):
            return result
        if tm.is_pause:
            raise ValueError(_say_not(obj.lora_name, result.error_message))
        await asyncio.sleep(LOOK_S)


async def why_no_room_in_a_pause(tm: PatchedTokenizerManager) -> str | None:
    """Why one more adapter cannot be loaded now, or None where it can.

    Upstream loads it, and unloads the one that was used least recently, whose name requests do
    not find from then on, whatever comes of the unloading.
    """
    most = get_lora().max_loaded_loras
    if most is None or len(tm.lora_registry.get_all_adapters()) < most:
        return None
    oldest = await tm.lora_registry.lru_lora_name(exclude_pinned=True)
    if oldest is None:
        return f"--max-loaded-loras is {most}, and all of them are pinned"
    if tm.is_pause and (users := _users(tm, oldest)):
        return f"--max-loaded-loras is {most}, and {_say(oldest, users)}"
    return None


def _users(tm: PatchedTokenizerManager, name: str) -> int:
    """How many requests use the adapter, which may wait to be unloaded already."""
    ref = tm.lora_registry.get_all_adapters().get(name)
    lora_id = ref.lora_id if ref is not None else tm.pending_lora_unloads.get(name)
    counter = tm.lora_registry._counters.get(lora_id) if lora_id is not None else None
    return counter.value() if counter is not None else 0


def _say(name: str, users: int) -> str:
    requests = f"{users} paused request{'s' if users > 1 else ''}"
    return _say_not(name, f"{requests} of it cannot end. Continue or abort, then unload it")


def _say_not(name: str, why: str) -> str:
    return f"the adapter {name!r} cannot be unloaded while generation is paused: {why}"
