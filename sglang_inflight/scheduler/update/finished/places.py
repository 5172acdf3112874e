"""Everything that a model computes with, by its place in the model.

A forward reads parameters, buffers, and plain attributes of modules: tensors, numbers, containers
of them. SGLang also keeps some in a module's ``quant_method`` and ``scheme``, which are no modules,
and in attributes of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from sglang.srt.lora.layers import BaseLayerWithLoRA
from torch import nn

from sglang_inflight.scheduler.update.attributes import attributes_of, methods_of, tensors_in
from sglang_inflight.storages import memory_key, range_of, span_of

Number = bool | int | float | None


class Place(NamedTuple):
    """``module``: its path, as in a model without LoRA. ``at``: position within a container."""

    module: str
    attribute: str
    at: int = 0

    def __str__(self) -> str:
        index = f"[{self.at}]" if self.at else ""
        return ".".join(filter(None, (self.module, self.attribute))) + index


class Owner(NamedTuple):
    """An object with attributes: a module, or the method or a parameter of one."""

    module: str
    # prefix of its attributes' names: "quant_method." for a module's method
    prefix: str
    object: Any


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with its path, in plain attributes and containers too.

    A base layer in a LoRA wrapper has the wrapper's path, and the wrapper is left out.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, BaseLayerWithLoRA):
            waiting.append((path, module.base_layer))
            continue
        yield path, module
        prefix = f"{path}." if path else ""
        hidden = [
            (f"{prefix}{name}", found)
            for name, value in attributes_of(module)
            for found in _modules_in(value)
        ]
        named = [(f"{prefix}{n}", m) for n, m in module._modules.items() if m is not None]
        # the last one is taken first: a registered module's path wins
        waiting[:0] = reversed(hidden)
        waiting += reversed(named)


def _modules_in(value: Any) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _modules_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _modules_in(item)


def owners_of(model: nn.Module) -> Iterator[Owner]:
    for path, module in modules_of(model):
        yield from owners_at(path, module)


def owners_at(path: str, module: nn.Module) -> Iterator[Owner]:
    """Yield ``module`` itself, its methods, and its parameters with attributes."""
    yield Owner(path, "", module)
    for name, method in methods_of(module):
        yield Owner(path, f"{name}.", method)
    for name, parameter in module._parameters.items():
        if parameter is not None and vars(parameter):
            yield Owner(path, f"{name}.", parameter)


def values_of(owner: Owner) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of ``owner`` by name; a module's parameters and buffers too."""
    if isinstance(owner.object, nn.Module):
        yield from owner.object._parameters.items()
        for name, buffer in owner.object._buffers.items():
            if name not in owner.object._non_persistent_buffers_set:
                yield name, buffer
        yield from attributes_of(owner.object)
    else:
        yield from vars(owner.object).items()


def tensors_of(model: nn.Module) -> dict[Place, torch.Tensor]:
    """Return every tensor of ``model`` with memory, by its place."""
    return {place: tensor for owner in owners_of(model) for place, tensor in tensors_at(owner)}


def tensors_at(owner: Owner) -> Iterator[tuple[Place, torch.Tensor]]:
    """Yield every tensor of ``owner`` with memory, with its place."""
    for name, value in values_of(owner):
        for at, tensor in enumerate(tensors_in(value)):
            yield Place(owner.module, owner.prefix + name, at), tensor


def numbers_of(model: nn.Module) -> dict[Place, tuple[Any, str, Number]]:
    """Return, by place, the object and the attribute that hold a number, and the number."""
    return {
        Place(owner.module, owner.prefix + name): (owner.object, name, value)
        for owner in owners_of(model)
        for name, value in values_of(owner)
        if isinstance(value, bool | int | float)
    }


def without_views(tensors: dict[Place, torch.Tensor]) -> dict[Place, Place]:
    """Return, for each place, the place of the widest tensor that its memory lies in.

    A tensor with memory of its own has its own place. Raise ``ValueError`` with a place whose
    memory is partly another's.
    """
    by_storage: dict[int, list[Place]] = {}
    for place, tensor in tensors.items():
        by_storage.setdefault(memory_key(tensor), []).append(place)
    found: dict[Place, Place] = {}
    for places in by_storage.values():
        widest: list[Place] = []
        for place in sorted(places, key=lambda at: -span_of(tensors[at])):
            begin, end = range_of(tensors[place])
            for other in widest:
                first, last = range_of(tensors[other])
                if first <= begin and end <= last:
                    found[place] = other
                    break
                if begin < last and first < end:
                    raise ValueError(f"{place} and {other} share a part of their memory")
            else:
                widest.append(place)
                found[place] = place
    return found


def split_name(name: str) -> tuple[str, str]:
    """Return the module's path and the attribute of a parameter's or buffer's ``name``."""
    module, _, attribute = name.rpartition(".")
    return module, attribute
