"""Memory of tensors: storages, shared by several tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def memory_key(tensor: torch.Tensor) -> int:
    """Return an identifier of the storage of ``tensor``, on any device.

    The identifier is unique while a tensor lies in the storage. Unlike a pointer it distinguishes
    tensors on the meta device.
    """
    return tensor.untyped_storage()._cdata


def span_of(tensor: torch.Tensor) -> int:
    """Return how many elements of its storage ``tensor`` spans."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes of ``tensor`` in its storage."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + span_of(tensor) * tensor.itemsize


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of ``tensors``, each once, in order."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        found.setdefault(memory_key(tensor), tensor.untyped_storage())
    return list(found.values())


def give_back_freed(device: torch.device) -> None:
    """Return torch's cached free memory, of ``device`` and of pinned host memory, to the system."""
    torch.get_device_module(device).empty_cache()
    torch.accelerator.empty_host_cache()
