"""Two ways for new weights into a running server; ``trainer.py`` has the third."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from examples.stories.weights import NamedTensor, in_chunks, read_tensors
from sglang_inflight.client import AsyncClient

Receipt = Mapping[str, Any]

CHUNK_BYTES = 24 << 20


async def update_from_disk(client: AsyncClient, checkpoint: Path, version: str) -> Receipt:
    return await client.update_from_disk(str(checkpoint), weight_version=version)


async def update_from_tensors(
    client: AsyncClient, checkpoint: Path, version: str, *, ranks: int = 1
) -> Receipt:
    """A session of many calls, which goes live at its end, all at once.

    The calls carry handles of shared memory rather than bytes, because trainer and server
    are on one machine. A chunk may be freed when its call is answered.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    async with client.session(weight_version=version, partial=False) as receipt:
        for chunk in in_chunks(read_tensors(checkpoint), CHUNK_BYTES):
            payload = await asyncio.to_thread(_serialize, chunk)
            await client.update("tensor", serialized_named_tensors=[payload] * ranks)
    return receipt


def _serialize(chunk: list[NamedTensor]) -> str:
    from sglang.srt.utils import MultiprocessingSerializer

    payload: str = MultiprocessingSerializer.serialize(chunk, output_str=True)
    return payload
