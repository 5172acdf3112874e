"""Shadow weights: a second set of storage that a model's own loader can fill."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from sglang_inflight.scheduler.update.attributes import (
    attributes_of,
    modules_of,
    replace,
    tensors_in,
)
from sglang_inflight.scheduler.update.checks.dataflow import Kind, Target, Write
from sglang_inflight.scheduler.update.rate import yield_gil
from sglang_inflight.storages import memory_key, range_of, span_of
from sglang_inflight.tensor_digest import Digest
from sglang_inflight.vocabulary.errors import Refused


class ReservedStorage(NamedTuple):
    """Storage for the shadow of ``original``. A reference to ``original`` keeps its id unique."""

    original: torch.Tensor
    storage: torch.Tensor


class ShadowParameters:
    """The shadow storage of one rank, by the id of the shadowed tensor.

    All models of the rank use one object: a weight shared by a draft and its target has one
    shadow.
    """

    def __init__(self, reserved: dict[int, ReservedStorage] | None = None) -> None:
        self._reserved = reserved or {}
        self._by_original: dict[int, tuple[torch.Tensor, Any]] = {}
        # pairs of original and shadow, by the storage of either
        self._weights: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def get(self, original: torch.Tensor) -> Any:
        """Return the shadow of ``original``, or None if there is none yet."""
        known = self._by_original.get(id(original))
        return None if known is None else known[1]

    def add(self, original: torch.Tensor, shadow: torch.Tensor, *, is_weight: bool) -> None:
        self._by_original[id(original)] = original, shadow
        if is_weight:
            self._note_weight((original, shadow))

    def reindex(self) -> None:
        """Index the pairs anew before an update: a commit on a CPU exchanges their memory."""
        pairs = {id(pair[1]): pair for found in self._weights.values() for pair in found}
        self._weights = {}
        for pair in pairs.values():
            self._note_weight(pair)
            yield_gil()

    def _note_weight(self, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        for tensor in pair:
            self._weights.setdefault(memory_key(tensor), []).append(pair)

    def lies_in_a_weight(self, tensor: torch.Tensor) -> bool:
        return memory_key(tensor) in self._weights

    def view_like(self, view: torch.Tensor) -> torch.Tensor | None:
        """Return the same view of the shadow if ``view`` lies in a weight, else None."""
        for original, shadow in self._weights.get(memory_key(view), ()):
            offset = view.storage_offset() - original.storage_offset()
            if offset >= 0 and span_of(view) + offset <= span_of(original):
                return shadow.data.as_strided(
                    view.shape, view.stride(), shadow.storage_offset() + offset
                )
        return None

    def keep_reserved_for(self, originals: Iterable[torch.Tensor]) -> None:
        """Free the storage reserved for tensors other than ``originals``."""
        used = {id(original) for original in originals}
        for unused in self._reserved.keys() - used:
            del self._reserved[unused]

    def storage_for(self, original: torch.Tensor, storage: torch.device) -> torch.Tensor:
        """Return storage like ``original`` on the device ``storage``, reserved or new."""
        kept = self._reserved.pop(id(original), None)
        if kept is not None and _are_alike(original, kept.storage):
            return kept.storage
        # pinned on the host, so that copies from and to a device do not block the host
        pinned = storage.type == "cpu" and original.device.type != "cpu"
        return torch.empty_like(original.data, device=storage, pin_memory=pinned)

    def forget(self) -> None:
        """Free all memory, even of shadows still referenced elsewhere."""
        for original, shadow in self._by_original.values():
            if shadow is not original:
                shadow.data = shadow.data.new_empty(0)
        self._by_original.clear()
        self._weights.clear()
        self._reserved.clear()


class Shadow:
    """A structural clone of a model, with tensors in storage of their own.

    Every module is a shallow copy. Shadows replace parameters and buffers, and keep the class,
    attributes, loader and ties of the originals. Tensors, parameters and modules in plain
    attributes are replaced too, and so are modules with a bound loader. So the clone's
    ``load_weights`` loads fused, sharded, tied and stacked parameters as the model's does, and
    reaches nothing of the live model. A commit exchanges the weights, and the tensors derived from
    them in place. ``find_derived`` finds any other change made by loading.

    Owners: the staging thread writes the shadows while an update is open. After the seal only the
    scheduler's thread touches them, in a ``PreparedSwap``. The commit's message orders the two.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: ShadowParameters,
        storage: torch.device,
        handle_for: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """``handle_for`` returns what stands for a weight, if not a copy in ``storage``."""
        self._handle_for = handle_for
        self._parameters = parameters
        self._storage = storage
        self._live = model
        self._modules: dict[int, nn.Module] = {}
        # ids of shadows made here, and of shadows shared with an earlier model
        self._own: set[int] = set()
        self._shared: set[int] = set()
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
        self._parameters.reindex()
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
            is_foreign = id(shadow) in self._shared
            found[memory_key(shadow)] = Target(Kind.FOREIGN if is_foreign else Kind.WEIGHT, name)
            yield_gil()
        return found

    def note_write(self, write: Write) -> None:
        """Note a loader's write before it happens."""
        if write.target.kind is Kind.DERIVED:
            self._written.add(self._derived_at[write.memory])

    @property
    def derived_pairs(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, live tensor and shadow of each derived tensor for the commit to exchange."""
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
        for name, kept, _ in self.derived_pairs:
            # the commit would exchange one memory twice
            if self._parameters.lies_in_a_weight(kept) or memory_key(kept) in exchanged:
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
        return [t for t in tensors_in(value) if not self._parameters.lies_in_a_weight(t)]

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
                    if self._parameters.lies_in_a_weight(shadow):
                        continue
                    known.add(id(shadow))
                    self._derived.append((called, live, shadow))

    def _shadow_of(self, value: torch.Tensor | nn.Module) -> Any:
        if isinstance(value, nn.Module):
            return self._modules.get(id(value), value)
        known = self._parameters.get(value)
        if known is None:
            known = self._parameters.view_like(value)
        return self._copy(value) if known is None else known

    def _shadow_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        known: nn.Parameter | None = self._parameters.get(parameter)
        if known is not None:
            if id(known) not in self._own:
                self._shared.add(id(known))
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
        self._parameters.add(parameter, shadow, is_weight=True)
        self._own.add(id(shadow))
        return shadow

    def _bound_to_the_clone(self, loader: Any) -> Any:
        """Return ``loader``, bound at its call to its module's clone, which may not exist yet."""

        def load(*args: Any, **kwargs: Any) -> Any:
            return replace(loader, self._shadow_of)(*args, **kwargs)

        return load

    def _shadow_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        known: torch.Tensor | None = self._parameters.get(buffer)
        if known is None:
            known = self._storage_for(buffer)
            if self._handle_for is None:
                known.copy_(buffer.detach())
            self._parameters.add(buffer, known, is_weight=True)
        return known

    def _storage_for(self, weight: torch.Tensor) -> torch.Tensor:
        if self._handle_for is not None:
            return self._handle_for(weight)
        return self._parameters.storage_for(weight, self._storage)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = self._storage
        # a scale kept on the host stays there
        if storage.type not in ("cpu", "meta"):
            storage = tensor.device
        shadow = self._parameters.storage_for(tensor, storage).copy_(tensor.detach())
        self._parameters.add(tensor, shadow, is_weight=False)
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
