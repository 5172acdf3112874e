"""Load an adapter on every rank or on none, and unload none of a paused request.

SGLang itself reads only the first rank's answer, and after a failure does not unload other ranks.
It unloads an adapter after its last request, and blocks every other load until then. In a pause no
request ends. So a trainer pausing to change its adapter would wait for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import (
    LoadLoRAAdapterFromTensorsReqInput,
    LoRAUpdateOutput,
)

from sglang_inflight.extensions.adapters.adapters import Adapters
from sglang_inflight.extensions.adapters.folder import refuse_irregular
from sglang_inflight.extensions.adapters.messages import (
    ADAPTER_IN_USE,
    LoadAdapter,
    LoadAdapterFromTensors,
)
from sglang_inflight.hooking import AROUND, REPLACE, TOKENIZER_MANAGER, hook, with_us
from sglang_inflight.sglang_types import get_lora
from sglang_inflight.vocabulary.errors import Conflict, HandlerFailed, Refused, list_names

if TYPE_CHECKING:
    from sglang.srt.lora.lora_registry import LoRARegistry
    from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager
    from sglang_inflight.sglang_types import LoadAdapterRequest

Load = Callable[..., Awaitable[Any]]
# SGLang's path of an adapter that came as tensors
_TENSORS = "__tensor__"
# How often an unload waiting for requests checks for a pause.
POLL_S = 0.2

Unload = Callable[..., Awaitable[Any]]


@hook(f"{TOKENIZER_MANAGER}.load_lora_adapter", AROUND, when=with_us)
@hook(f"{TOKENIZER_MANAGER}.load_lora_adapter_from_tensors", AROUND, when=with_us)
async def load_everywhere(
    load: Load, tm: PatchedTokenizerManager, obj: LoadAdapterRequest, *args: Any
) -> Any:
    """Wrap SGLang's own load, for calls and for requests. In a worker only requests load."""
    adapters = tm.inflight.part(Adapters)
    if adapters.reload is not None:
        return await adapters.reload(obj)
    if isinstance(obj, LoadAdapter | LoadAdapterFromTensors):
        # a load by ``Adapters``, which holds ``loading``
        return await _load_everywhere(load, tm, obj, *args)
    async with adapters.loading:
        request = _as_ours(tm, obj)
        result = await _load_everywhere(load, tm, request, *args)
        if result.success:
            path = getattr(request, "lora_path", None)
            adapters.note(request.adapter, path, request.adapter_version, request.lora_id)
        return result


async def _load_everywhere(
    load: Load, tm: PatchedTokenizerManager, request: Any, *args: Any
) -> Any:
    if (reason := await why_no_room(tm)) is not None:
        return LoRAUpdateOutput(success=False, error_message=reason)
    try:
        path = getattr(request, "lora_path", None)
        await asyncio.to_thread(refuse_irregular, path)
        result = await load(tm, request, *args)
    except (Refused, HandlerFailed) as error:
        result = LoRAUpdateOutput(success=False, error_message=str(error))
    if not result.success and request.lora_id is not None:
        await tm.inflight.part(Adapters).unload_failed(request.lora_name, request.lora_id)
    return result


def _as_ours(tm: PatchedTokenizerManager, obj: Any) -> Any:
    """Convert SGLang's own request to ours, with a version."""
    fields = {name: getattr(obj, name) for name in type(obj).__struct_fields__}
    path = getattr(obj, "lora_path", None)
    version, digest = tm.inflight.part(Adapters).version_of(obj.lora_name, path)
    fields |= {"adapter": obj.lora_name, "adapter_version": version}
    if isinstance(obj, LoadLoRAAdapterFromTensorsReqInput):
        return LoadAdapterFromTensors(**fields)
    return LoadAdapter(**fields, digest=digest)


@hook(f"{TOKENIZER_MANAGER}.unload_lora_adapter", AROUND, when=with_us)
async def refuse_to_unload_in_a_pause(
    unload: Unload, tm: PatchedTokenizerManager, obj: UnloadLoRAAdapterReqInput, *args: Any
) -> Any:
    """Wrap a user's call. Raises ``Conflict`` before anything is changed.

    The check takes no lock: another unload may hold the lock while waiting for paused requests.
    """
    tm.inflight.require_owner()
    if tm.is_pause and _users(tm, obj.lora_name):
        # is_pause may be out of date
        await tm.inflight.pauses.ask_status()
        if tm.is_pause and (users := _users(tm, obj.lora_name)):
            raise Conflict(_describe_users(obj.lora_name, users))
    return await unload(tm, obj, *args)


@hook(f"{TOKENIZER_MANAGER}._unload_lora_adapter_locked", AROUND, when=with_us)
async def stop_unloading_in_a_pause(
    unload: Unload, tm: PatchedTokenizerManager, obj: UnloadLoRAAdapterReqInput
) -> Any:
    """Wrap the unload under SGLang's lock, also an eviction on behalf of a load.

    While requests use the adapter nothing is sent to the schedulers, so the wait can be abandoned.
    On a ``ValueError`` SGLang answers with its text, takes no new request for the adapter, and
    accepts a second unload. A rank also refuses if it has requests of a dead worker, unknown here.
    """
    unloading = asyncio.ensure_future(_unload_when_ranks_let(unload, tm, obj))
    try:
        while not unloading.done():
            await asyncio.wait({unloading}, timeout=POLL_S)
            if tm.is_pause and not unloading.done() and (users := _users(tm, obj.lora_name)):
                raise ValueError(_describe_users(obj.lora_name, users))
        return await unloading
    finally:
        unloading.cancel()
        await asyncio.wait({unloading})


async def _unload_when_ranks_let(
    unload: Unload, tm: PatchedTokenizerManager, obj: UnloadLoRAAdapterReqInput
) -> Any:
    while True:
        result = await unload(tm, obj)
        if result.success or ADAPTER_IN_USE not in (result.error_message or ""):
            return result
        if tm.is_pause:
            raise ValueError(_describe_refusal(obj.lora_name, result.error_message))
        await asyncio.sleep(POLL_S)


async def why_no_room(tm: PatchedTokenizerManager) -> str | None:
    """Return why no further adapter can be loaded now, or None if one can.

    SGLang loads the adapter, then unloads the least recently used one. Requests no longer find
    that one's name, even if unloading it fails.
    """
    most = get_lora().max_loaded_loras
    if most is None or len(tm.lora_registry.get_all_adapters()) < most:
        return None
    oldest = await tm.lora_registry.lru_lora_name(exclude_pinned=True)
    if oldest is None:
        loaded = tm.lora_registry.get_all_adapters().values()
        sent = [repr(ref.lora_name) for ref in loaded if ref.lora_path == _TENSORS]
        if not sent:
            return f"--max-loaded-loras is {most}, and all of them are pinned"
        return (
            f"--max-loaded-loras is {most}, and no request could load these again, because they "
            f"came as tensors: {list_names(sent)}. Unload one first"
        )
    if tm.is_pause and (users := _users(tm, oldest)):
        return f"--max-loaded-loras is {most}, and {_describe_users(oldest, users)}"
    return None


@hook("sglang.srt.lora.lora_registry.LoRARegistry.lru_lora_name", REPLACE, when=with_us)
async def find_victim(registry: LoRARegistry, exclude_pinned: bool = False) -> str | None:
    """Replace ``LoRARegistry.lru_lora_name``: spare adapters that came as tensors.

    The ranks have the only copy of these. A folder's adapter is loaded again for a request.
    """
    async with registry._registry_lock.reader_lock:
        for name, ref in registry._registry.items():
            if ref.lora_path != _TENSORS and not (exclude_pinned and ref.pinned):
                return name
    return None


def _users(tm: PatchedTokenizerManager, name: str) -> int:
    """Return the number of requests of an adapter, loaded or waiting to be unloaded."""
    ref = tm.lora_registry.get_all_adapters().get(name)
    lora_id = ref.lora_id if ref is not None else tm.pending_lora_unloads.get(name)
    counter = tm.lora_registry._counters.get(lora_id) if lora_id is not None else None
    return counter.value() if counter is not None else 0


def _describe_users(name: str, users: int) -> str:
    requests = f"{users} paused request{'s' if users > 1 else ''}"
    return _describe_refusal(name, f"{requests} cannot finish. Continue or abort, then unload it")


def _describe_refusal(name: str, why: str) -> str:
    return f"the adapter {name!r} cannot be unloaded while generation is paused: {why}"
