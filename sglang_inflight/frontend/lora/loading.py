"""An adapter is loaded on every rank or on none, and each load has a version.

SGLang hears the first rank of a replica alone, and leaves what other ranks have loaded.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import (
    LoadLoRAAdapterFromTensorsReqInput,
    LoRAUpdateOutput,
    UnloadLoRAAdapterReqInput,
)

from sglang_inflight.errors import HandlerFailed, Refused
from sglang_inflight.frontend.lora.unloading import why_no_room_in_a_pause
from sglang_inflight.messages import LoadAdapter, LoadAdapterFromTensors

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager
    from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager
    from sglang_inflight.sglang_types.requests import LoadAdapterRequest

Load = Callable[..., Awaitable[Any]]


async def load_everywhere(
    load: Load, tm: PatchedTokenizerManager, obj: LoadAdapterRequest, *args: Any
) -> Any:
    """Around SGLang's own loading, whoever asks for it. In a worker that is a request."""
    if (worker := tm.inflight.worker) is not None:
        return await worker.reload(obj)
    if isinstance(obj, LoadAdapter | LoadAdapterFromTensors):
        # by way of ``Adapters``, in its turn
        return await _load_everywhere(load, tm, obj, *args)
    async with tm.inflight.adapters.loading:
        return await _load_everywhere(load, tm, _as_ours(tm, obj), *args)


async def _load_everywhere(
    load: Load, tm: PatchedTokenizerManager, request: Any, *args: Any
) -> Any:
    if (reason := await why_no_room_in_a_pause(tm)) is not None:
        return LoRAUpdateOutput(success=False, error_message=reason)
    try:
        result = await load(tm, request, *args)
    except (Refused, HandlerFailed) as error:
        result = LoRAUpdateOutput(success=False, error_message=str(error))
    if not result.success and request.lora_id is not None:
        await tm.inflight.adapters.take_back(request.lora_name, request.lora_id)
    return result


async def unload_unused(tm: TokenizerManager, lora_id: str) -> Any:
    """An adapter that no name leads to any more. Ranks that do not have it are content."""
    name = new_name("unused")
    tm.pending_lora_unloads[name] = lora_id
    return await tm.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))


def new_name(name: str) -> str:
    """One that no adapter has."""
    return f"{name}#{uuid.uuid4().hex}"


def _as_ours(tm: PatchedTokenizerManager, obj: Any) -> Any:
    """SGLang's own request, with a version."""
    shape: Any = LoadAdapter
    if isinstance(obj, LoadLoRAAdapterFromTensorsReqInput):
        shape = LoadAdapterFromTensors
    fields = {name: getattr(obj, name) for name in type(obj).__struct_fields__}
    version = tm.inflight.adapters.version_of(obj.lora_name, getattr(obj, "lora_path", None))
    return shape(**fields, adapter=obj.lora_name, adapter_version=version)
