"""A shadow: a clone of a model for the model's own loader, with other memory."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from sglang_inflight.scheduler.update.attributes import (
    attributes_of,
    modules_of,
    replace,
    tensors_in,
)
from sglang_inflight.scheduler.update.changes.handles import Handle
from sglang_inflight.scheduler.update.checks.dataflow import Kind, Target, Write
from sglang_inflight.scheduler.update.rate import yield_gil
from sglang_inflight.storages import memory_key, range_of, span_of
from sglang_inflight.tensor_digest import Digest
from sglang_inflight.vocabulary.errors import Refused


class Shadow:
    """A structural clone of a model, with tensors in memory of their own.

    Every module is a shallow copy. Shadows replace parameters and buffers, and keep the class,
    attributes, loader and ties of the originals. Tensors, parameters and modules in plain
    attributes are replaced too, and so are modules with a bound loader. So the clone's
    ``load_weights`` loads fused, sharded, tied and stacked parameters as the model's does, and
    reaches nothing of the live model. ``find_derived`` finds what loading has changed besides
    tensors in place.

    One thread uses a shadow: the one that runs the loader.
    """

    def __init__(
        self,
        model: nn.Module,
        storage: torch.device,
        handle_for: Callable[[torch.Tensor], Handle] | None = None,
        foreign: Container[str] = (),
    ) -> None:
        """``handle_for`` makes the memory of a weight, if not a copy in ``storage``.

        ``foreign``: names of weights that another model owns. Writes to them are left out.
        """
        self._handle_for = handle_for
        # the clone's memory of weights, by ``memory_key``
        self.handles: dict[int, Handle] = {}
        self._foreign = foreign
        self._storage = storage
        self._live = model
        # originals, kept so that ids stay unique, and shadows by the original's id
        self._shadows: dict[int, tuple[torch.Tensor, Any]] = {}
        # weights and their shadows by the memory of either
        self._at: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._modules: dict[int, nn.Module] = {}
        self.model: nn.Module = self._clone(model)
        shadows = dict(weights_of(self.model))
        # (name, live, shadow) of each distinct parameter and persistent buffer
        self.pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = [
            (name, live, shadows[name]) for name, live in weights_of(model)
        ]
        # the clone's value, and its checksum, by the module's id and the attribute
        self._placed: dict[tuple[int, str], tuple[Any, str]] = {}
        # (name, live, shadow) of each distinct tensor besides the weights
        self._derived: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        # indices into ``_derived`` by the shadow's memory, in this update
        self._derived_at: dict[int, int] = {}
        # indices into ``_derived`` of the tensors written since ``begin``
        self._written: set[int] = set()
        # a shadow's memory at the update's begin, by its id
        self._memory: dict[int, torch.Tensor] = {}
        self._targets: dict[int, Target] = {}
        self._replace_attributes()

    def begin(self) -> None:
        """Reset the derived tensors to the live model's values, before an update.

        The memory is indexed anew, because a commit on a CPU exchanges pointers.
        """
        for at in self._written:
            _, live, shadow = self._derived[at]
            shadow.copy_(live)
        if self._written:
            for place, (value, _) in self._placed.items():
                self._placed[place] = value, self._checksum_of(value)
        self._written.clear()
        self._at = {}
        for _, live, shadow in self.pairs:
            self._note_weight(live, shadow)
            yield_gil()
        self._derived_at = {memory_key(own): at for at, (_, _, own) in enumerate(self._derived)}
        # held until ``find_derived``: no other tensor can get this memory
        self._memory = {id(shadow): shadow.detach() for _, _, shadow in self.pairs}
        self._targets = self._find_targets()

    def targets(self) -> dict[int, Target]:
        """Return all memory in reach of the model's loader, by ``memory_key``."""
        return self._targets

    def _find_targets(self) -> dict[int, Target]:
        found: dict[int, Target] = {}
        for name, live, shadow in self._derived:
            found[memory_key(live)] = Target(Kind.SERVED, name)
            found[memory_key(shadow)] = Target(Kind.DERIVED, name)
        for name, live, shadow in self.pairs:
            found[memory_key(live)] = Target(Kind.SERVED, name)
            kind = Kind.FOREIGN if name in self._foreign else Kind.WEIGHT
            found[memory_key(shadow)] = Target(kind, name)
            yield_gil()
        return found

    def note_write(self, write: Write) -> None:
        """Note a loader's write before it happens."""
        if write.target.kind is Kind.DERIVED:
            self._written.add(self._derived_at[write.memory])

    @property
    def derived(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, live tensor and shadow of each tensor besides the weights that was written."""
        return [self._derived[at] for at in sorted(self._written)]

    def find_derived(self) -> str | None:
        """Return the name of a change by loading that no commit can exchange, or None."""
        now, memory = dict(weights_of(self.model)), self._memory
        self._memory = {}
        for name, _, shadow in self.pairs:
            held = memory.get(id(shadow), shadow)
            if now.get(name) is not shadow or memory_key(held) != memory_key(shadow):
                return name
            yield_gil()
        memory.clear()
        exchanged: set[int] = set()
        for name, kept, _ in self.derived:
            # the commit would exchange one memory twice
            if self._lies_in_a_weight(kept) or memory_key(kept) in exchanged:
                return name
            exchanged.add(memory_key(kept))
        for name, module in modules_of(self._live):
            yield_gil()
            live = dict(attributes_of(module))
            for attribute, value in attributes_of(self._modules[id(module)]):
                placed = self._placed.get((id(module), attribute))
                if self._is_changed(value, live.get(attribute), placed):
                    return f"{name}.{attribute}" if name else attribute
        return None

    def _is_changed(self, value: Any, live: Any, placed: tuple[Any, str] | None) -> bool:
        """Return whether a loader changed an attribute to ``value``, unlike ``live``."""
        if isinstance(value, float):
            is_as_placed = placed is not None and value == placed[0]
            return not is_as_placed and isinstance(live, float | None) and value != live
        tensors = self._no_weights_in(value)
        if not tensors:
            return False
        if placed is not None and value is placed[0]:
            places = [self._derived_at.get(memory_key(tensor)) for tensor in tensors]
            # the commit exchanges the value, or loading did not change it
            if None not in places and not self._written.isdisjoint(places):
                return False
            if self._checksum_of(value) == placed[1]:
                return False
        others = self._no_weights_in(live)
        return len(tensors) != len(others) or not all(
            _are_alike(one, other) and torch.equal(one, other.to(one.device))
            for one, other in zip(tensors, others, strict=True)
        )

    def _checksum_of(self, value: Any) -> str:
        return "" if isinstance(value, float) else checksum(self._no_weights_in(value))

    def _no_weights_in(self, value: Any) -> list[torch.Tensor]:
        return [t for t in tensors_in(value) if not self._lies_in_a_weight(t)]

    def _clone(self, module: nn.Module) -> nn.Module:
        if id(module) in self._modules:
            return self._modules[id(module)]
        clone = self._modules[id(module)] = copy.copy(module)
        attributes: dict[str, Any] = clone.__dict__
        attributes["_parameters"] = {
            name: None if p is None else self._shadow_parameter(p)
            for name, p in module._parameters.items()
        }
        attributes["_buffers"] = {
            name: buffer
            if buffer is None or name in module._non_persistent_buffers_set
            else self._shadow_buffer(buffer)
            for name, buffer in module._buffers.items()
        }
        attributes["_modules"] = {
            name: None if child is None else self._clone(child)
            for name, child in module._modules.items()
        }
        return clone

    def _replace_attributes(self) -> None:
        """Replace tensors in attributes, after each parameter and module has a shadow."""
        known: set[int] = set()
        for path, module in modules_of(self._live):
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
                self._placed[id(module), name] = own, self._checksum_of(own)
                called = f"{path}.{name}" if path else name
                both = (tensors_in(each, also_without_memory=True) for each in (value, own))
                for live, shadow in zip(*both, strict=True):
                    if live.is_meta or id(shadow) in known:
                        continue
                    if self._lies_in_a_weight(shadow):
                        continue
                    known.add(id(shadow))
                    self._derived.append((called, live, shadow))

    def _shadow_of(self, value: torch.Tensor | nn.Module) -> Any:
        if isinstance(value, nn.Module):
            return self._modules.get(id(value), value)
        known = self._known(value)
        if known is None:
            known = self._view_like(value)
        return self._copy(value) if known is None else known

    def _known(self, original: torch.Tensor) -> Any:
        found = self._shadows.get(id(original))
        return None if found is None else found[1]

    def _note_weight(self, live: torch.Tensor, shadow: torch.Tensor) -> None:
        for tensor in live, shadow:
            self._at.setdefault(memory_key(tensor), []).append((live, shadow))

    def _lies_in_a_weight(self, tensor: torch.Tensor) -> bool:
        return memory_key(tensor) in self._at

    def _view_like(self, view: torch.Tensor) -> torch.Tensor | None:
        """Return the same view of the shadow if ``view`` lies in a weight, else None."""
        for original, shadow in self._at.get(memory_key(view), ()):
            offset = view.storage_offset() - original.storage_offset()
            if offset >= 0 and span_of(view) + offset <= span_of(original):
                return shadow.data.as_strided(
                    view.shape, view.stride(), shadow.storage_offset() + offset
                )
        return None

    def _shadow_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        known: nn.Parameter | None = self._known(parameter)
        if known is not None:
            return known
        shadow: nn.Parameter = torch.Tensor._make_subclass(
            type(parameter),
            self._storage_for(parameter),
            parameter.requires_grad,
        )
        shadow.__dict__.update(parameter.__dict__)
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(getattr(loader, "__self__", None), nn.Module):
            # one of SGLang's classes has a read-only property of this name, over ``_weight_loader``
            is_property = hasattr(type(parameter), "weight_loader")
            slot = "_weight_loader" if is_property else "weight_loader"
            setattr(shadow, slot, self._bound_to_the_clone(loader))
        self._shadows[id(parameter)] = parameter, shadow
        self._note_weight(parameter, shadow)
        return shadow

    def _bound_to_the_clone(self, loader: Any) -> Any:
        """Return ``loader``, bound at its call to its module's clone, which may not exist yet."""

        def load(*args: Any, **kwargs: Any) -> Any:
            return replace(loader, self._shadow_of)(*args, **kwargs)

        return load

    def _shadow_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        known: torch.Tensor | None = self._known(buffer)
        if known is None:
            known = self._storage_for(buffer)
            self._shadows[id(buffer)] = buffer, known
            self._note_weight(buffer, known)
        return known

    def _storage_for(self, weight: torch.Tensor) -> torch.Tensor:
        if self._handle_for is not None:
            handle = self._handle_for(weight)
            self.handles[memory_key(handle.tensor)] = handle
            return handle.tensor
        return torch.empty_like(weight.data, device=self._storage)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        # a scale kept on the host stays there
        is_device = self._storage.type not in ("cpu", "meta")
        shadow = tensor.detach().to(tensor.device if is_device else self._storage, copy=True)
        self._shadows[id(tensor)] = tensor, shadow
        return shadow


def refresh_derived(model: nn.Module) -> None:
    """Recompute the modules' tensors derived from weights, in place.

    ``GemmaRMSNorm`` does so in its parameter's loader, ``Gemma4Router`` at its first forward.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "refresh_gemma_weight"):
            module.refresh_gemma_weight()
        if hasattr(module, "_scale_fused"):
            module.fuse_scale()


def derives(model: nn.Module) -> bool:
    """Return whether ``refresh_derived`` has something to do."""
    return any(
        hasattr(module, "refresh_gemma_weight") or hasattr(module, "_scale_fused")
        for module in model.modules()
    )


@torch.no_grad()
def fuse_scales(model: nn.Module) -> None:
    """Fuse ``Gemma4Router``'s scales at the start instead of at the first forward."""
    module: Any
    for module in model.modules():
        if getattr(module, "_scale_fused", None) is False:
            module.fuse_scale()


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """Return a checksum over shapes, dtypes and bytes of ``tensors``."""
    digest = Digest()
    for tensor in tensors:
        if tensor.is_meta:
            continue
        for _ in digest.read("", tensor):
            pass
    return digest.hexdigest()


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise ``Refused`` if two weights of ``model`` share memory, and are not one and the same.

    A commit would exchange that memory twice, and its rollback would end with a mixture.
    """
    by_storage: dict[int, list[tuple[tuple[int, int], str]]] = {}
    for name, weight in weights_of(model):
        if weight.numel():
            by_storage.setdefault(memory_key(weight), []).append((range_of(weight), name))
    for weights in by_storage.values():
        for ((_, end), name), ((begin, _), other) in itertools.pairwise(sorted(weights)):
            if begin < end:
                raise Refused(
                    f"the weights {name!r} and {other!r} share memory: "
                    "SGLANG_INFLIGHT_STAGING=off writes them in place"
                )


def weights_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each distinct parameter and persistent buffer: a checkpoint may hold these.

    Of two parameters with the same memory only the first is yielded.
    """
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in modules_of(model)
        for name in module._non_persistent_buffers_set
    }
    seen: set[tuple[int, int, torch.Size]] = set()
    for name, weight in itertools.chain(model.named_parameters(), model.named_buffers()):
        place = memory_key(weight), int(weight.storage_offset()), weight.shape
        if name in transient or (place in seen and weight.numel()):
            continue
        seen.add(place)
        yield name, weight
