"""What a model holds besides its weights: tensors that no checkpoint has a name for.

Rotary tables, scales, tensors in lists and dicts, and now and then a dict of the parameters
themselves. A loader may write them, or put others in their place.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

# what every module has, which the clone takes care of, or which no loader writes
_OF_MODULES = frozenset(nn.Module().__dict__)
_CONTAINERS = (list, tuple, dict, OrderedDict)
# of containers in containers, and no deeper
_DEPTH = 3


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Plain attributes, and the buffers that are in no checkpoint."""
    for name, value in module.__dict__.items():
        if name not in _OF_MODULES:
            yield name, value
    for name in sorted(module._non_persistent_buffers_set):
        yield name, module._buffers.get(name)


def tensors_in(
    value: Any, depth: int = _DEPTH, *, also_without_memory: bool = False
) -> Iterator[torch.Tensor]:
    """In ``value`` and its containers, in their order. Those in other objects are not seen."""
    if isinstance(value, torch.Tensor):
        if _has_memory(value) or (also_without_memory and value.is_meta):
            yield value
    elif type(value) in _CONTAINERS and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, depth - 1, also_without_memory=also_without_memory)


def replace(value: Any, shadow_of: Callable[[Any], Any], depth: int = _DEPTH) -> Any:
    """``value`` with the shadows of the tensors and modules in it, or itself where none is."""
    if isinstance(value, torch.Tensor):
        return shadow_of(value) if _has_memory(value) else value
    if isinstance(value, nn.Module):
        return shadow_of(value)
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        return types.MethodType(value.__func__, shadow_of(value.__self__))
    if type(value) not in _CONTAINERS or not depth:
        return value
    if isinstance(value, dict):
        items = {key: replace(item, shadow_of, depth - 1) for key, item in value.items()}
        same = all(items[key] is item for key, item in value.items())
        return value if same else type(value)(items)
    replaced = [replace(item, shadow_of, depth - 1) for item in value]
    same = all(new is old for new, old in zip(replaced, value, strict=True))
    return value if same else type(value)(replaced)


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta
