"""Memory of tensors: storages, shared by several tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def memory_of(tensor: torch.Tensor) -> tuple[torch.device, int]:
    """Return a key of the tensor's storage."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of ``tensors``, each once, in order."""
    found: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
    for tensor in tensors:
        found.setdefault(memory_of(tensor), tensor.untyped_storage())
    return list(found.values())


def give_back_freed(device: torch.device) -> None:
    """Return torch's cached free memory, of ``device`` and of pinned host memory, to the system."""
    torch.get_device_module(device).empty_cache()
    torch.accelerator.empty_host_cache()
