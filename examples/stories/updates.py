"""Three ways for new weights into a running server. Each answers with the receipt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch

from examples.stories.weights import NamedTensor, in_chunks, read_tensors

Receipt = dict[str, Any]
OnBytes = Callable[[int], None]

CHUNK_BYTES = 24 << 20

# stage while decoding, keep the KV of running requests
IN_FLIGHT = {"non_blocking": True, "flush_cache": False}


async def update_from_disk(client: httpx.AsyncClient, checkpoint: Path, version: str) -> Receipt:
    body = {"model_path": str(checkpoint), "weight_version": version, **IN_FLIGHT}
    return await post(client, "/update_weights_from_disk", body)


async def update_from_tensors(
    client: httpx.AsyncClient, checkpoint: Path, version: str, *, ranks: int = 1
) -> Receipt:
    """A session of many calls, which goes live at its end, all at once.

    The calls carry handles of shared memory rather than bytes, because trainer and server
    are on one machine. A chunk may be freed when its call is answered.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    opened = await post(client, "/begin_weight_update", {"non_blocking": True, "partial": False})
    if not opened["success"]:
        return opened
    named = {"session_id": opened["session_id"]}
    for chunk in in_chunks(read_tensors(checkpoint), CHUNK_BYTES):
        payload = await asyncio.to_thread(_serialize, chunk)
        body = {"serialized_named_tensors": [payload] * ranks, **IN_FLIGHT, **named}
        staged = await post(client, "/update_weights_from_tensor", body)
        if not staged["success"]:
            await post(client, "/abort_weight_update", named)
            return staged
    body = {"weight_version": version, **IN_FLIGHT, **named}
    return await post(client, "/end_weight_update", body)


def _serialize(chunk: list[NamedTensor]) -> str:
    from sglang.srt.utils import MultiprocessingSerializer

    payload: str = MultiprocessingSerializer.serialize(chunk, output_str=True)
    return payload


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Receipt:
    """The answer, also where the call failed: a failure is a receipt, too."""
    try:
        return read_receipt(await client.post(path, json=body))
    except httpx.HTTPError as error:
        return {"success": False, "message": f"{path}: {type(error).__name__}: {error}"}


def read_receipt(response: httpx.Response) -> Receipt:
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        answer = {"message": response.text}
    succeeded = response.is_success and answer.get("success", True)
    return {"message": "", **answer, "success": bool(succeeded)}
