"""Whose memory a tensor lies in: that of a storage, which tensors may share."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def memory_of(tensor: torch.Tensor) -> tuple[torch.device, int]:
    """Equal for tensors of one storage."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Those of ``tensors``, once each, in their order."""
    found: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
    for tensor in tensors:
        found.setdefault(memory_of(tensor), tensor.untyped_storage())
    return list(found.values())


def give_back_freed(device: torch.device) -> None:
    """Torch keeps what is freed of ``device``, and of the host's pinned memory, for the next who
    asks: others are to have it."""
    torch.get_device_module(device).empty_cache()
    torch.accelerator.empty_host_cache()
