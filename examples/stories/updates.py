"""Update a running server from disk, from tensors, and by a patch; ``trainer.py`` broadcasts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from examples.stories.weights import NamedTensor, changes_between, in_chunks, read_tensors
from sglang_inflight.client import AsyncClient

Receipt = Mapping[str, Any]

CHUNK_BYTES = 24 << 20


async def update_from_disk(client: AsyncClient, checkpoint: Path, version: str) -> Receipt:
    answer = await client.update_from_disk(str(checkpoint), weight_version=version)
    return answer.as_json()


async def update_from_tensors(
    client: AsyncClient, checkpoint: Path, version: str, *, ranks: int = 1
) -> Receipt:
    """Send tensors in a session of many calls, committed together at its end.

    The calls carry handles of shared memory instead of bytes, because trainer and server share a
    machine. A chunk may be freed when its call is answered.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")
    async with client.session(weight_version=version, partial=False) as receipt:
        for chunk in in_chunks(read_tensors(checkpoint), CHUNK_BYTES):
            payload = await asyncio.to_thread(_serialize, chunk)
            await client.update("tensor", serialized_named_tensors=[payload] * ranks)
    return receipt


async def update_by_patch(
    client: AsyncClient, served: Path, checkpoint: Path, version: str, *, served_version: str
) -> Receipt:
    """Send the elements of ``checkpoint`` that differ from ``served``, on one rank.

    A patch fits one base alone: the server refuses it unless ``served_version`` is served.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")
    payload = await asyncio.to_thread(lambda: _serialize(list(changes_between(served, checkpoint))))
    answer = await client.update(
        "tensor",
        serialized_named_tensors=[payload],
        load_format="sparse",
        weight_version=version,
        expected_version=served_version,
    )
    return answer.as_json()


def _serialize(chunk: list[NamedTensor]) -> str:
    from sglang.srt.utils import MultiprocessingSerializer

    payload: str = MultiprocessingSerializer.serialize(chunk, output_str=True)
    return payload
