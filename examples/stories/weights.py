"""A checkpoint's tensors, in memory as in a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

NamedTensor = tuple[str, torch.Tensor]


def read_tensors(checkpoint: Path) -> Iterator[NamedTensor]:
    """Read tensors one after the other, in a fixed order."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  it is no dict
                yield name, tensors.get_tensor(name)


def changes_between(old: Path, new: Path) -> Iterator[NamedTensor]:
    """Yield where checkpoint ``new`` differs from ``old``, both in bfloat16, as sparse tensors.

    ``NAME.indices`` has flat positions in the tensor ``NAME`` (int32), and ``NAME.values`` the new
    values there. A tensor without a change is left out.
    """
    before = dict(read_tensors(old))
    for name, tensor in read_tensors(new):
        # as bits, because 0.0 equals -0.0
        differs = tensor.view(torch.int16) != before[name].view(torch.int16)
        at = differs.view(-1).nonzero().view(-1)
        if len(at):
            yield f"{name}.indices", at.to(torch.int32)
            yield f"{name}.values", tensor.view(-1)[at]


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
