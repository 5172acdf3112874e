"""Finds a model's tensors besides its weights: no checkpoint has names for them.

Examples are rotary tables, scales, tensors in lists and dicts, and sometimes a dict of the
parameters themselves. A loader may write these tensors, or replace them.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

# attributes of every module: the clone copies them, or no loader writes them
_OF_MODULES = frozenset(nn.Module().__dict__)
# attributes with the method of a layer's quantization
METHODS = ("quant_method", "scheme")
_CONTAINERS = (list, tuple, dict, OrderedDict)
# levels of containers within containers
_DEPTH = 3


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what ``model.named_modules()`` yields, in the same order.

    PyTorch passes each module through a generator of each level above it. An update looks at all
    modules some ten times.
    """
    seen: set[int] = set()
    ahead = [("", model)]
    while ahead:
        path, module = ahead.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        prefix = f"{path}." if path else ""
        children = [(prefix + name, m) for name, m in module._modules.items() if m is not None]
        ahead.extend(reversed(children))


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield plain attributes and non-persistent buffers, by name."""
    for name, value in module.__dict__.items():
        if name not in _OF_MODULES:
            yield name, value
    for name in sorted(module._non_persistent_buffers_set):
        yield name, module._buffers.get(name)


def namespaces_of(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dicts in which a forward of ``module`` may set values, each with its path.

    The objects that hold a layer's method of quantization keep tensors of the layer, too.
    """
    for name in ("", "_parameters", "_buffers", "_modules"):
        yield "", module.__dict__[name] if name else module.__dict__
    for name, method in methods_of(module):
        yield name, vars(method)


def methods_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the objects beside modules that keep tensors and numbers of ``module``, by name."""
    for name in METHODS:
        method = module.__dict__.get(name)
        if hasattr(method, "__dict__") and not isinstance(method, nn.Module | type):
            yield name, method


def values_in(namespace: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values, while another thread may add some."""
    for name, value in tuple(namespace.items()):
        if name not in _OF_MODULES:
            yield name, value


def tensors_in(
    value: Any, depth: int = _DEPTH, *, also_without_memory: bool = False
) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value`` and its containers, in order. Other objects are skipped."""
    if isinstance(value, torch.Tensor):
        if _has_memory(value) or (also_without_memory and value.is_meta):
            yield value
    elif type(value) in _CONTAINERS and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, depth - 1, also_without_memory=also_without_memory)


def replace(value: Any, shadow_of: Callable[[Any], Any], depth: int = _DEPTH) -> Any:
    """Return ``value`` with shadows for its tensors and modules, or itself if it has none."""
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
