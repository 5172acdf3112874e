"""Load an adapter on every rank or on none, and give each load a version.

SGLang itself reads only the first rank's answer, and after a failure does not unload other ranks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import (
    LoadLoRAAdapterFromTensorsReqInput,
    LoRAUpdateOutput,
)

from sglang_inflight.frontend.lora.unloading import why_no_room_in_a_pause
from sglang_inflight.messages import LoadAdapter, LoadAdapterFromTensors
from sglang_inflight.vocabulary.errors import HandlerFailed, Refused

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager
    from sglang_inflight.sglang_types import LoadAdapterRequest

Load = Callable[..., Awaitable[Any]]


async def load_everywhere(
    load: Load, tm: PatchedTokenizerManager, obj: LoadAdapterRequest, *args: Any
) -> Any:
    """Wrap SGLang's own load, for calls and for requests. In a worker only requests load."""
    if (worker := tm.inflight.worker) is not None:
        return await worker.reload(obj)
    if isinstance(obj, LoadAdapter | LoadAdapterFromTensors):
        # from ``Adapters``, which holds ``loading``
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
        await tm.inflight.adapters.unload_failed(request.lora_name, request.lora_id)
    return result


def _as_ours(tm: PatchedTokenizerManager, obj: Any) -> Any:
    """Convert SGLang's own request to ours, with a version."""
    shape: Any = LoadAdapter
    if isinstance(obj, LoadLoRAAdapterFromTensorsReqInput):
        shape = LoadAdapterFromTensors
    fields = {name: getattr(obj, name) for name in type(obj).__struct_fields__}
    version = tm.inflight.adapters.version_of(obj.lora_name, getattr(obj, "lora_path", None))
    return shape(**fields, adapter=obj.lora_name, adapter_version=version)
