"""A checksum of weights, to compare what ranks and runs serve."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable

import torch

CHUNK_BYTES = 8 << 20


def digest(weights: Iterable[tuple[str, torch.Tensor]], spend: Callable[[int], None]) -> str:
    """16 hex digits over names, shapes, dtypes and bytes; ``spend`` paces the reading."""
    whole = hashlib.sha256()
    for name, tensor in weights:
        checksum = 0
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for chunk in torch.split(flat, CHUNK_BYTES):
            checksum = zlib.crc32(chunk.cpu().numpy().data, checksum)
            spend(chunk.numel())
        whole.update(f"{name} {list(tensor.shape)} {tensor.dtype} {checksum:08x}\n".encode())
    return whole.hexdigest()[:16]
