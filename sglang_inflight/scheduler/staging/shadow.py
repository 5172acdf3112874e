"""Shadow weights: a second set of storage that a model's own loader can fill."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

# a parameter's name, its twin, and what a loader writes to it
Writing = Callable[[str, torch.Tensor, torch.Tensor], AbstractContextManager[None]]


def unwatched(name: str, twin: torch.Tensor, loaded: torch.Tensor) -> AbstractContextManager[None]:
    return nullcontext()


class Twins:
    """The shadow storage of one rank, by the id of the parameter or buffer it shadows.

    One for all models of the rank: what a draft shares with its target is one weight, and
    has one shadow. ``writing`` is entered around each write of a loader.
    """

    def __init__(self) -> None:
        self.by_original: dict[int, Any] = {}
        self.writing: Writing = unwatched


class Shadow:
    """A structural clone of a model, whose parameters are storage of their own.

    With ``storage`` None the twins share the originals' storage instead: the model's own
    loader then writes the live weights, and still tells of every write.

    Every module is a shallow copy; parameters and persistent buffers are replaced by
    twins that keep class, attributes, loader and ties of the originals. So
    ``twin.load_weights`` knows how fused, sharded, tied and stacked parameters load,
    and writes the twins only. Non-persistent buffers (rotary tables) are shared: no
    checkpoint holds them.

    Owners: the staging thread writes the twins while an update is open. Once it is sealed
    only the scheduler's thread touches them, in ``exchange``. The message that carries
    the commit orders the two.
    """

    def __init__(self, model: nn.Module, twins: Twins, storage: torch.device | None) -> None:
        self._twins = twins
        self._storage = storage
        self._modules: dict[int, nn.Module] = {}
        self.twin: nn.Module = self._clone(model, "")
        shadows = dict(_weights(self.twin))
        # (name, live, shadow) of each distinct parameter and persistent buffer
        self.pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = [
            (name, live, shadows[name]) for name, live in _weights(model)
        ]

    def _clone(self, module: nn.Module, prefix: str) -> nn.Module:
        if id(module) in self._modules:
            return self._modules[id(module)]
        twin = self._modules[id(module)] = copy.copy(module)
        attributes: dict[str, Any] = twin.__dict__
        attributes["_parameters"] = {
            name: None if p is None else self._twin_parameter(p, f"{prefix}{name}")
            for name, p in module._parameters.items()
        }
        attributes["_buffers"] = {
            name: buffer
            if buffer is None or name in module._non_persistent_buffers_set
            else self._twin_buffer(buffer)
            for name, buffer in module._buffers.items()
        }
        attributes["_modules"] = {
            name: None if child is None else self._clone(child, f"{prefix}{name}.")
            for name, child in module._modules.items()
        }
        return twin

    def _twin_parameter(self, parameter: nn.Parameter, name: str) -> nn.Parameter:
        known: nn.Parameter | None = self._twins.by_original.get(id(parameter))
        if known is not None:
            return known
        twin: nn.Parameter = torch.Tensor._make_subclass(  # type: ignore[attr-defined]
            type(parameter), self._twin_storage(parameter.data), parameter.requires_grad
        )
        twin.__dict__.update(parameter.__dict__)
        load = getattr(parameter, "weight_loader", default_weight_loader)

        def load_and_tell(
            param: nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            with self._twins.writing(name, param, loaded_weight):
                return load(param, loaded_weight, *args, **kwargs)

        # a class of upstream's has a read-only property of the name, over this attribute
        slot = "_weight_loader" if hasattr(type(parameter), "weight_loader") else "weight_loader"
        setattr(twin, slot, load_and_tell)
        self._twins.by_original[id(parameter)] = twin
        return twin

    def _twin_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        known: torch.Tensor | None = self._twins.by_original.get(id(buffer))
        if known is None:
            known = self._twin_storage(buffer)
            if self._storage is not None:
                known.copy_(buffer)
            self._twins.by_original[id(buffer)] = known
        return known

    def _twin_storage(self, original: torch.Tensor) -> torch.Tensor:
        if self._storage is None:
            return original
        # a host's copy for a device is pinned, so that copies need no host wait
        pinned = self._storage.type == "cpu" and original.device.type != "cpu"
        return torch.empty_like(original, device=self._storage, pin_memory=pinned)


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name not in transient:
            yield name, buffer


def why_not_shadowed(model: nn.Module) -> str | None:
    """The reason why ``model`` cannot be staged, or None where it can.

    Loading is not the whole story for these: something is derived from the weights
    afterwards, and a shadow without it would be served un-finalised.
    """
    if hasattr(model, "post_load_weights"):
        return f"{type(model).__name__} derives further weights after loading"
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and not type(method).__name__.startswith("Unquantized"):
            return f"{name} is quantized by {type(method).__name__}"
        if getattr(module, "use_intel_amx_backend", False):
            return f"{name} is packed for AMX after loading"
    if torch.version.hip is not None:
        return "ROCm kernels may shuffle weights after loading"
    return None
