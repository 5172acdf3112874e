"""A test plugin for SGLang: the host's memory looks like a device of 1 GiB that holds all tensors.

SGLang sizes the KV cache by the device's free memory. That of a host changes at any moment.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

SIZE_GB = 1.0


def install() -> None:
    name = "get_available_gpu_memory"
    modules = [module for key, module in [*sys.modules.items()] if key.startswith("sglang.")]
    for module in modules:
        if name in vars(module):
            setattr(module, name, free_gb)


def free_gb(*args: Any, **kwargs: Any) -> float:
    """Return what tensors leave of the device, in GiB, like SGLang's function of this place."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if issubclass(type(tensor), torch.Tensor) and not tensor.is_meta
    }
    return SIZE_GB - sum(storages.values()) / (1 << 30)
