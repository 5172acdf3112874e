"""Shadow weights: a second set of storage that a model's own loader can fill."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from sglang_inflight.scheduler.update.attributes import attributes_of, replace, tensors_in
from sglang_inflight.scheduler.update.checks.digest import Digest

# A parameter's name, its shadow, and what a loader writes to it. Says whether it may.
Writing = Callable[[str, torch.Tensor, torch.Tensor], AbstractContextManager[bool]]


def unwatched(
    name: str, shadow: torch.Tensor, loaded: torch.Tensor
) -> AbstractContextManager[bool]:
    return nullcontext(True)


class Kept(NamedTuple):
    """Storage for the shadow of ``original``, which is held so that its id stays its own."""

    original: torch.Tensor
    storage: torch.Tensor


class ShadowParameters:
    """The shadow storage of one rank, by the id of the tensor it shadows.

    One for all models of the rank: what a draft shares with its target is one weight, and
    has one shadow. ``writing`` is entered around each write of a loader, which is not made
    where it says so.
    """

    def __init__(self, reserved: dict[int, Kept] | None = None) -> None:
        self._reserved = reserved or {}
        self._by_original: dict[int, tuple[torch.Tensor, Any]] = {}
        # by id, of originals and of shadows
        self._weights: dict[int, torch.Tensor] = {}
        # by id, of a model that has no shadow
        self._written_in_place: dict[int, torch.Tensor] = {}
        self.writing: Writing = unwatched

    def get(self, original: torch.Tensor) -> Any:
        """The shadow of ``original``, or None where there is none yet."""
        known = self._by_original.get(id(original))
        return None if known is None else known[1]

    def add(self, original: torch.Tensor, shadow: torch.Tensor, *, is_weight: bool) -> None:
        self._by_original[id(original)] = original, shadow
        if is_weight:
            self._weights |= {id(original): original, id(shadow): shadow}

    def keep_for(self, model: nn.Module) -> None:
        """What ``model`` has is its own, also where one that comes later has it, too."""
        self._written_in_place |= {id(weight): weight for _, weight in weights_of(model)}

    def is_kept(self, original: torch.Tensor) -> bool:
        return id(original) in self._written_in_place

    def is_weight(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._weights

    def storage_for(self, original: torch.Tensor, storage: torch.device) -> torch.Tensor:
        """Like ``original``, on ``storage``; what was reserved for it, if something was."""
        kept = self._reserved.pop(id(original), None)
        if kept is not None and _are_alike(original, kept.storage):
            return kept.storage
        # a host's copy for a device is pinned, so that copies need no host wait
        pinned = storage.type == "cpu" and original.device.type != "cpu"
        return torch.empty_like(original.data, device=storage, pin_memory=pinned)

    def forget(self) -> None:
        """Give all memory back, also that of shadows that somebody still holds."""
        for original, shadow in self._by_original.values():
            if shadow is not original:
                shadow.data = shadow.data.new_empty(0)
        self._by_original.clear()
        self._weights.clear()
        self._written_in_place.clear()
        self._reserved.clear()


class Shadow:
    """A structural clone of a model, whose tensors are storage of their own.

    With ``storage`` None the shadows share the originals' storage instead: the model's own
    loader then writes the live weights, and still tells of every write.

    Every module is a shallow copy; parameters and buffers are replaced by shadows that keep
    class, attributes, loader and ties of the originals, and so are tensors, parameters and
    modules in plain attributes, and modules to which a loader is bound. So
    ``load_weights`` of the clone knows how fused, sharded, tied and stacked parameters load, and
    reaches nothing of the live model. Of what it writes, only weights are committed:
    ``find_derived`` tells whether it wrote anything else.

    Owners: the staging thread writes the shadows while an update is open. Once it is sealed
    only the scheduler's thread touches them, in a ``PreparedSwap``. The message that carries
    the commit orders the two.
    """

    def __init__(
        self, model: nn.Module, parameters: ShadowParameters, storage: torch.device | None
    ) -> None:
        self._parameters = parameters
        self._storage = storage
        self._live = model
        self._modules: dict[int, nn.Module] = {}
        # by id: the shadows that were made here, and those that another model had before
        self._own: set[int] = set()
        self._shared: set[int] = set()
        self.model: nn.Module = self._clone(model, "")
        shadows = dict(weights_of(self.model))
        # (name, live, shadow) of each distinct parameter and persistent buffer
        self.pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = [
            (name, live, shadows[name]) for name, live in weights_of(model)
        ]
        # by module and name: what the clone got, and a checksum of it
        self._placed: dict[tuple[int, str], tuple[Any, str]] = {}
        if storage is not None:
            self._replace_attributes()

    def is_anothers(self, shadow: torch.Tensor) -> bool:
        """Whether it shadows what this model shares with one that came before it."""
        return id(shadow) in self._shared

    def find_derived(self) -> str | None:
        """What loading changed in the clone that no commit brings to the live model."""
        now = dict(weights_of(self.model))
        for name, _, shadow in self.pairs:
            if now.get(name) is not shadow:
                return name
        for name, module in self._live.named_modules():
            live = dict(attributes_of(module))
            for attribute, value in attributes_of(self._modules[id(module)]):
                placed = self._placed.get((id(module), attribute))
                if self._is_changed(value, live.get(attribute), placed):
                    return f"{name}.{attribute}" if name else attribute
        return None

    def _is_changed(self, value: Any, live: Any, placed: tuple[Any, str] | None) -> bool:
        """Whether a loader changed an attribute to ``value``, which ``live`` does not have."""
        if isinstance(value, float):
            is_as_placed = placed is not None and value == placed[0]
            return not is_as_placed and isinstance(live, float | None) and value != live
        tensors = self._no_weights_in(value)
        if not tensors or (
            placed is not None and value is placed[0] and _checksum(tensors) == placed[1]
        ):
            return False
        others = self._no_weights_in(live)
        return len(tensors) != len(others) or not all(
            _are_alike(one, other) and torch.equal(one, other.to(one.device))
            for one, other in zip(tensors, others, strict=True)
        )

    def _no_weights_in(self, value: Any) -> list[torch.Tensor]:
        return [tensor for tensor in tensors_in(value) if not self._parameters.is_weight(tensor)]

    def _clone(self, module: nn.Module, prefix: str) -> nn.Module:
        if id(module) in self._modules:
            return self._modules[id(module)]
        clone = self._modules[id(module)] = copy.copy(module)
        attributes: dict[str, Any] = clone.__dict__
        attributes["_parameters"] = {
            name: None if p is None else self._shadow_parameter(p, f"{prefix}{name}")
            for name, p in module._parameters.items()
        }
        attributes["_buffers"] = {
            name: buffer
            if buffer is None or name in module._non_persistent_buffers_set
            else self._shadow_buffer(buffer)
            for name, buffer in module._buffers.items()
        }
        attributes["_modules"] = {
            name: None if child is None else self._clone(child, f"{prefix}{name}.")
            for name, child in module._modules.items()
        }
        return clone

    def _replace_attributes(self) -> None:
        """After the clone: then each parameter and module has a shadow that is known."""
        for module in self._live.modules():
            clone = self._modules[id(module)]
            for name, value in attributes_of(module):
                if isinstance(value, float):
                    self._placed[id(module), name] = value, ""
                    continue
                own = replace(value, self._shadow_of)
                if own is value:
                    continue
                if name in module._non_persistent_buffers_set:
                    clone._buffers[name] = own
                else:
                    clone.__dict__[name] = own
                self._placed[id(module), name] = own, _checksum(self._no_weights_in(own))

    def _shadow_of(self, value: torch.Tensor | nn.Module) -> Any:
        if isinstance(value, nn.Module):
            return self._modules.get(id(value), value)
        known = self._parameters.get(value)
        return self._copy(value, is_weight=False) if known is None else known

    def _shadow_parameter(self, parameter: nn.Parameter, name: str) -> nn.Parameter:
        known: nn.Parameter | None = self._parameters.get(parameter)
        if known is not None:
            if id(known) not in self._own:
                self._shared.add(id(known))
            return known
        data = parameter.data
        if self._storage is not None:
            data = self._parameters.storage_for(parameter, self._storage)
        shadow: nn.Parameter = torch.Tensor._make_subclass(
            type(parameter), data, parameter.requires_grad
        )
        shadow.__dict__.update(parameter.__dict__)
        load = getattr(parameter, "weight_loader", default_weight_loader)

        def load_and_tell(
            param: nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            with self._parameters.writing(name, param, loaded_weight) as may_write:
                if may_write:
                    return self._bound_here(load)(param, loaded_weight, *args, **kwargs)
                return None

        # a class of upstream's has a read-only property of the name, over this attribute
        slot = "_weight_loader" if hasattr(type(parameter), "weight_loader") else "weight_loader"
        setattr(shadow, slot, load_and_tell)
        self._parameters.add(parameter, shadow, is_weight=True)
        (self._shared if self._parameters.is_kept(parameter) else self._own).add(id(shadow))
        return shadow

    def _bound_here(self, loader: Any) -> Any:
        """``loader``, bound to the clone of the module that it is bound to."""
        return loader if self._storage is None else replace(loader, self._shadow_of)

    def _shadow_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        known: torch.Tensor | None = self._parameters.get(buffer)
        return self._copy(buffer, is_weight=True) if known is None else known

    def _copy(self, tensor: torch.Tensor, *, is_weight: bool) -> torch.Tensor:
        shadow, storage = tensor, self._storage
        if storage is not None:
            # a scale that is kept on the host stays there
            if not is_weight and storage.type != "cpu":
                storage = tensor.device
            shadow = self._parameters.storage_for(tensor, storage).copy_(tensor.detach())
        self._parameters.add(tensor, shadow, is_weight=is_weight)
        return shadow


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _checksum(tensors: Iterable[torch.Tensor]) -> str:
    digest = Digest()
    for tensor in tensors:
        for _ in digest.read("", tensor):
            pass
    return digest.hexdigest()


def weights_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each distinct parameter and persistent buffer, which are what a checkpoint may hold."""
    yield from model.named_parameters()
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name not in transient:
            yield name, buffer
