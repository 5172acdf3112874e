"""Adapters that a trainer loads again under their name, while requests use them.

vLLM's trainers write an adapter anew at each step and load it by the same name, in place.
SGLang refuses a name that is loaded, and unloads an adapter only when no request uses it.

So a name that is loaded passes to the new adapter: requests from then on use that one, those
that run end with the one they began with, and each adapter has prefixes of its own, by its id.
The old one is unloaded when its last request has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING

import msgspec
from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput

from sglang_inflight.errors import NotFound, RankFailed, Refused
from sglang_inflight.frontend.bodies import Body, Name
from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.http.endpoints import Content
from sglang_inflight.upstream.runtime_context import get_lora

if TYPE_CHECKING:
    from sglang_inflight.frontend.upstream.lora_registry import LoRARef
    from sglang_inflight.frontend.upstream.tokenizer_manager import TokenizerManager


class LoadBody(Body, kw_only=True, forbid_unknown_fields=False):
    lora_name: Name
    lora_path: Name
    # SGLang's
    pinned: bool = False


class UnloadBody(Body, kw_only=True, forbid_unknown_fields=False):
    lora_name: Name


class Adapters:
    """Lives on the front end's event loop, where SGLang's registry of adapters lives, too."""

    def __init__(self, frontend: Frontend, tokenizer_manager: TokenizerManager) -> None:
        self._in_background = frontend.in_background
        self._tokenizer_manager = tokenizer_manager
        self._serial = itertools.count()
        # two loads of one name would each take the other for the old one
        self._loading = asyncio.Lock()

    async def load(self, body: LoadBody) -> Content:
        """Raises ``RankFailed`` with SGLang's reason; what was loaded stays then."""
        async with self._loading:
            _require_files(body.lora_path)
            is_loaded = body.lora_name in self._loaded()
            if is_loaded and get_lora().max_loaded_loras is not None:
                raise Refused(
                    f"the adapter {body.lora_name!r} is loaded, and with --max-loaded-loras there "
                    "may be no room for the one that takes its name: unload it first"
                )
            # ranks do not take a name twice, and know requests by the adapter's id
            name = self._new_name(body.lora_name) if is_loaded else body.lora_name
            loaded = await self._tokenizer_manager.load_lora_adapter(
                LoadLoRAAdapterReqInput(
                    lora_name=name, lora_path=body.lora_path, pinned=body.pinned
                )
            )
            if not loaded.success:
                raise RankFailed(f"the adapter was not loaded: {loaded.error_message}")
            if is_loaded:
                await self._hand_over(body.lora_name, name)
        return {
            "success": True,
            "status": "ok",
            "message": f"Success: LoRA adapter {body.lora_name!r} added.",
            "lora_name": body.lora_name,
            "loaded_adapters": self._loaded(),
        }

    async def unload(self, body: UnloadBody) -> Content:
        known = self._loaded().keys() | self._tokenizer_manager.pending_lora_unloads.keys()
        if body.lora_name not in known:
            raise NotFound(f"the adapter {body.lora_name!r} is not loaded")
        await self._unload(body.lora_name)
        # else a request would load it again
        self._tokenizer_manager.lora_ref_cache.pop(body.lora_name, None)
        return {
            "success": True,
            "status": "ok",
            "message": f"Success: LoRA adapter {body.lora_name!r} removed.",
            "loaded_adapters": self._loaded(),
        }

    async def _hand_over(self, name: str, new_name: str) -> None:
        """A request has looked its name up before this, or looks it up after it."""
        registry = self._tokenizer_manager.lora_registry
        async with registry._registry_lock.writer_lock:
            old = registry._registry.pop(name)
            new = msgspec.structs.replace(registry._registry.pop(new_name), lora_name=name)
            registry._registry[name] = new
        self._tokenizer_manager.lora_ref_cache[name] = new
        self._tokenizer_manager.lora_ref_cache.pop(new_name, None)
        self._in_background(self._retire(old))

    async def _retire(self, old: LoRARef) -> None:
        """Without SGLang's lock of adapters, which would keep the next one waiting."""
        name = self._new_name(str(old.lora_name))
        counter = self._tokenizer_manager.lora_registry._counters.get(old.lora_id)
        if counter is not None:
            await counter.wait_for_zero()
        self._tokenizer_manager.pending_lora_unloads[name] = old.lora_id
        await self._unload(name)

    async def _unload(self, name: str) -> None:
        unloaded = await self._tokenizer_manager.unload_lora_adapter(
            UnloadLoRAAdapterReqInput(lora_name=name)
        )
        if not unloaded.success:
            raise Refused(f"the adapter was not unloaded: {unloaded.error_message}")

    def _new_name(self, name: str) -> str:
        return f"{name}#{next(self._serial)}"

    def _loaded(self) -> dict[str, str | None]:
        adapters = self._tokenizer_manager.lora_registry.get_all_adapters()
        return {name: ref.lora_path for name, ref in adapters.items()}


def _require_files(path: str) -> None:
    """Trainers take a 404 for files that the network's disk does not show yet, and try again."""
    if os.path.isabs(path) and not os.path.exists(os.path.join(path, "adapter_config.json")):
        raise NotFound(f"no adapter found in {path}: it has no adapter_config.json")
