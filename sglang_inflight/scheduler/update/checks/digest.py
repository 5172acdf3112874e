"""A checksum of weights, to compare what ranks and runs serve."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import xxhash

CHUNK_BYTES = 8 << 20


class Digest:
    """Over names, shapes, dtypes and bytes of the weights that were read through it."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()

    def read(self, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Read ``tensor``, and hand on each piece of it, flat, as soon as it is read."""
        checksum = xxhash.xxh3_64()
        flat = tensor.detach().contiguous().view(-1)
        for chunk in torch.split(flat, max(1, CHUNK_BYTES // flat.element_size())):
            checksum.update(chunk.view(torch.uint8).cpu().numpy().data)
            yield chunk
        line = f"{name} {list(tensor.shape)} {tensor.dtype} {checksum.hexdigest()}\n"
        self._whole.update(line.encode())

    def hexdigest(self) -> str:
        """16 hex digits."""
        return self._whole.hexdigest()[:16]
