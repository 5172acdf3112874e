"""A checkpoint's tensors, in memory as in a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from sglang_inflight.client import changes_since

NamedTensor = tuple[str, torch.Tensor]


def read_tensors(checkpoint: Path) -> Iterator[NamedTensor]:
    """Read tensors one after the other, in a fixed order."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  it is no dict
                yield name, tensors.get_tensor(name)


def changes_between(old: Path, new: Path) -> Iterator[NamedTensor]:
    """Yield where checkpoint ``new`` differs from ``old``, as sparse tensors."""
    return changes_since(read_tensors(old), read_tensors(new))


def count_changes(patch: Iterable[NamedTensor]) -> int:
    return sum(len(tensor) for name, tensor in patch if name.endswith(".values"))


def in_chunks(tensors: Iterable[NamedTensor], chunk_bytes: int) -> Iterator[list[NamedTensor]]:
    """Yield as many tensors at a time as fit, and at least one."""
    chunk: list[NamedTensor] = []
    size = 0
    for name, tensor in tensors:
        if chunk and size + tensor.nbytes > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, tensor))
        size += tensor.nbytes
    if chunk:
        yield chunk


def checkpoint_bytes(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
