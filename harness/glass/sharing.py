"""Handles of the card's tensors in payloads, as torch's own of CUDA's.

A handle is the function ``rebuild_tensor`` with its arguments, in the order of torch's
``rebuild_cuda_tensor``, so whoever changes the device's index there finds it.
"""

from __future__ import annotations

from typing import Any

import torch

Handle = tuple[Any, tuple[Any, ...]]


def reduce_tensor(tensor: torch.Tensor) -> Handle:
    """Return the handle of a tensor on the card, for another process.

    The tensor's memory must outlive the other's use. The card's work on it is over on return.
    """
    card: Any = torch.get_device_module("glass")
    card.synchronize(tensor.device)
    arguments = (
        type(tensor),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        torch.UntypedStorage,
        tensor.dtype,
        tensor.device.index,
        card.share(tensor),
    )
    return rebuild_tensor, arguments


def rebuild_tensor(
    kind: type[torch.Tensor],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    storage: type[torch.UntypedStorage],
    dtype: torch.dtype,
    device: int,
    handle: dict[str, int],
) -> torch.Tensor:
    """Return a tensor over another process' memory, on ``device`` of this one."""
    card: Any = torch.get_device_module("glass")
    opened: torch.Tensor = card.open_shared({**handle, "device": device})
    return opened.view(dtype).as_strided(shape, stride, offset)


def allow_in_payloads() -> None:
    """Let payloads of tensors have such handles."""
    from sglang_inflight.scheduler.update.sources import unpickling

    unpickling._FUNCTIONS[rebuild_tensor.__module__, rebuild_tensor.__name__] = None
