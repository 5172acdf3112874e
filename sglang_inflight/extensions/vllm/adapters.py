"""vLLM's adapter routes: replace an adapter under its name while requests use it.

vLLM's trainers write an adapter at each step and load it by the same name, in place. So a load
here always replaces the adapter of that name.
"""

from __future__ import annotations

import os

from sglang_inflight.extensions.adapters.adapters import Adapters
from sglang_inflight.frontend.http.endpoints import Content
from sglang_inflight.vocabulary.bodies import LoadFolderBody, UnloadAdapterBody
from sglang_inflight.vocabulary.errors import NotFound


class LoadBody(LoadFolderBody, kw_only=True):
    replace: bool = True


class VLLMAdapters:
    """Load and unload adapters with vLLM's answers. Lives on the front end's event loop."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    async def load(self, body: LoadBody) -> Content:
        _require_files(body.lora_path)
        loaded = await self._adapters.load(body)
        return {
            "success": True,
            "status": "ok",
            "message": f"Success: LoRA adapter {body.lora_name!r} added.",
            "lora_name": body.lora_name,
            "adapter_version": loaded.adapter_version,
            "loaded_adapters": self._adapters.loaded(),
        }

    async def unload(self, body: UnloadAdapterBody) -> Content:
        if not self._adapters.knows(body.lora_name):
            raise NotFound(f"the adapter {body.lora_name!r} is not loaded")
        await self._adapters.unload(body, forget=True)
        return {
            "success": True,
            "status": "ok",
            "message": f"Success: LoRA adapter {body.lora_name!r} removed.",
            "loaded_adapters": self._adapters.loaded(),
        }


def _require_files(path: str) -> None:
    """Raise ``NotFound`` for a missing file: trainers retry a 404 until a network disk shows it."""
    if os.path.isabs(path) and not os.path.exists(os.path.join(path, "adapter_config.json")):
        raise NotFound(f"no adapter found in {path}: it has no adapter_config.json")
