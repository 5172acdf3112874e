"""Reload an evicted adapter for a request, through the owner.

With one worker SGLang reloads the adapter itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request, Response
from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, LoRAUpdateOutput

from sglang_inflight.frontend.workers.forward import owners_client

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager
    from sglang_inflight.sglang_types import LoadAdapterRequest

# only on the owner's socket
_PATH = "/inflight/reload_lora_adapter"


class _Asked(msgspec.Struct):
    lora_name: str
    lora_path: str
    pinned: bool | None


class _Answer(msgspec.Struct):
    success: bool
    error_message: str


async def reload(calls: Path, request: LoadAdapterRequest) -> LoRAUpdateOutput:
    """Ask the owner, from a worker, to reload an adapter. The worker has it after the return."""
    asked: Any = msgspec.convert(request, _Asked, from_attributes=True)
    async with owners_client(calls) as client:
        response = await client.post(f"http://owner{_PATH}", content=msgspec.json.encode(asked))
        response.raise_for_status()
    answer = msgspec.json.decode(response.content, type=_Answer)
    return LoRAUpdateOutput(success=answer.success, error_message=answer.error_message)


def mount(app: FastAPI, manager: PatchedTokenizerManager) -> None:
    """Mount the owner's route for workers' reloads."""

    async def load(request: Request) -> Response:
        asked = msgspec.json.decode(await request.body(), type=_Asked)
        result: LoRAUpdateOutput = await manager.load_lora_adapter(
            LoadLoRAAdapterReqInput(**msgspec.structs.asdict(asked))
        )
        answer = _Answer(success=result.success, error_message=result.error_message or "")
        return Response(msgspec.json.encode(answer), media_type="application/json")

    app.router.add_api_route(_PATH, load, methods=["POST"])
