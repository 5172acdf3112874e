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
