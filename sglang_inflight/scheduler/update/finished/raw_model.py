"""Loads tensors into a model in the layout of its checkpoint, and finishes it module by module.

    tensor    is written into a raw weight by the model's own loader
    module    is finished by SGLang's own steps once all of its tensors came
    result    every tensor and number of the module that loading or finishing made; handed on, and
              the module is raw again

So an update takes the memory of the modules that are not complete yet. ``post_load_weights`` reads
modules of the whole model: these wait for the seal.

Raw weights stay in the host's memory. Finishing may give a raw parameter other memory
(``parameter.data = ...``), and kernels outside of torch's dispatcher may write it. So a result is
known by what has become of the tensor, and the module gets its memory back afterwards.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from sglang.srt.model_loader.loader import device_loading_context
from torch import nn

from sglang_inflight.scheduler.plans.replay import Replay
from sglang_inflight.scheduler.update.attributes import METHODS
from sglang_inflight.scheduler.update.changes.handles import Handle
from sglang_inflight.scheduler.update.changes.intervals import Intervals
from sglang_inflight.scheduler.update.checks.dataflow import (
    Dataflow,
    Kind,
    Recorder,
    Target,
    Write,
)
from sglang_inflight.scheduler.update.finished.places import (
    Number,
    Owner,
    Place,
    modules_of,
    numbers_of,
    owners_at,
    owners_of,
    split_name,
    tensors_at,
    tensors_of,
    values_of,
)
from sglang_inflight.scheduler.update.finished.recipe import Recipe, describe_layout
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.shadow import Shadow
from sglang_inflight.storages import distinct_storages, memory_key
from sglang_inflight.vocabulary.errors import Refused, list_names


@dataclass
class Made:
    """Tensors and numbers that loading and finishing made of modules, by their places."""

    tensors: dict[Place, torch.Tensor] = field(default_factory=dict)
    numbers: dict[Place, Number] = field(default_factory=dict)
    # all tensors that the modules have now
    present: set[Place] = field(default_factory=set)


@dataclass
class RawWeight:
    name: str
    module: str
    attribute: str
    tensor: torch.Tensor
    handle: Handle
    # its value without a checkpoint
    default: torch.Tensor
    names: set[str] = field(default_factory=set)
    # the elements that the loader has written
    written: Intervals = field(default_factory=Intervals)
    is_written: bool = False
    # whether its memory has the elements that no tensor brings
    is_prepared: bool = False

    @property
    def place(self) -> Place:
        return Place(self.module, self.attribute)

    def reset(self) -> None:
        if self.is_prepared:
            self.handle.release()
        self.names.clear()
        self.written = Intervals()
        self.is_written = self.is_prepared = False


class RawModel(Recorder):
    """The raw weights of one model, of one update after the other. Used on the staging thread.

    A subclass says in ``take`` what becomes of results.
    """

    def __init__(
        self,
        pristine: nn.Module,
        live: nn.Module,
        device: torch.device,
        rate_limit: RateLimit,
        recipe: Recipe,
    ) -> None:
        """``pristine`` is the model as constructed, ``live`` the one served."""
        self._device = device
        self._rate_limit = rate_limit
        self._recipe = recipe
        self._shadow = Shadow(pristine, device, partial(Handle, is_watched=False))
        self.model = self._shadow.model
        self._modules = dict(modules_of(self.model))
        self._live = live
        self._live_modules = dict(modules_of(live))
        self._raw_weights = {
            key: RawWeight(name, *split_name(name), shadow, self._shadow.handles[key], default)
            for name, default, shadow in self._shadow.pairs
            for key in [memory_key(shadow)]
        }
        self._of_module: dict[str, list[RawWeight]] = {}
        for weight in self._raw_weights.values():
            self._of_module.setdefault(weight.module, []).append(weight)
        self._post_loaders = _outermost_with_post_load(self.model)
        self._raw = {path: State(path, module) for path, module in self._modules.items()}
        self._raw_tensors = tensors_of(self.model)
        # each of them keeps the storage in ``State``
        self._raw_memory = {place: memory_key(t) for place, t in self._raw_tensors.items()}
        # raw weights by their memory on the device, which is kept
        self._moved: dict[int, tuple[RawWeight, torch.Tensor]] = {}
        self._raw_numbers = {at: value for at, (_, _, value) in numbers_of(self.model).items()}
        self._targets: dict[int, Target] = {}
        self._complete: list[str] = []
        self._done: set[str] = set()
        self._replay: Replay | None = None
        # modules whose weights come by a plan, until the loader uses one; and these weights
        self._planned: dict[str, list[str]] = {}
        # modules that the loader used after tensors of the plan came
        self._torn: set[str] = set()
        # memory written by finishing, and modules read by ``post_load_weights``
        self._finishing = self._post_loading = False
        self._rewritten: set[int] = set()
        self._read_modules: set[str] = set()
        self._is_partial = self._is_post_loaded = False

    def take(self, made: Made) -> None:
        """Use the tensors of ``made``; they are valid during this call only."""
        raise NotImplementedError

    # ---- loading ----------------------------------------------------------------------

    def begin(self, replay: Replay | None, *, is_partial: bool) -> None:
        """Begin an update. ``is_partial``: modules that are not sent stay as they are served.

        Modules that the plan of ``replay`` writes are staged past the loader, and not finished
        (``plannable.py``).
        """
        self._is_partial, self._is_post_loaded = is_partial, False
        self.forget()
        self._replay = replay
        for name in replay.planned if replay is not None else ():
            self._planned.setdefault(split_name(name)[0], []).append(name)
        self._shadow.begin()
        self._targets = {
            memory_key(tensor): Target(Kind.SERVED, str(place))
            for place, tensor in self._served_tensors().items()
        } | self._shadow.targets()
        for module in self._post_loaders:
            # the loader calls it after each piece of an update, where weights may be missing
            module.post_load_weights = _wait_for_the_seal

    def _served_tensors(self) -> dict[Place, torch.Tensor]:
        return tensors_of(self._live)

    def forget(self) -> None:
        """Give back the memory of the update's tensors, and make all modules raw."""
        for path, state in self._raw.items():
            state.restore(self._modules[path])
        for weight in self._raw_weights.values():
            weight.reset()
        self._planned.clear()
        self._torn.clear()
        self._moved.clear()
        self._complete.clear()
        self._done.clear()
        self._rewritten.clear()

    def targets(self) -> dict[int, Target]:
        """Return all memory in reach of the model's loader, by ``memory_key``."""
        return self._targets

    def note_write(self, write: Write) -> None:
        """Prepare a raw weight for a write, before the write."""
        self._shadow.note_write(write)
        weight = self._raw_weights.get(write.memory)
        if self._finishing or weight is None:
            if weight is not None:
                self._refuse_planned(weight)
            self._rewritten.add(write.memory)
            return
        self._leave(weight)
        if not weight.is_prepared:
            is_whole = write.sets_all and write.view.nbytes == weight.tensor.nbytes
            self._prepare(weight, fills=not is_whole)
        weight.is_written = True
        if write.sets_all:
            weight.written.add_view(write.view, weight.tensor.itemsize)
        weight.names |= write.names
        self._done.discard(weight.module)
        # a tensor that the served checkpoint has not may have others beside it
        is_there = all(self._names_of(w) == w.names for w in self._of_module[weight.module])
        if is_there and weight.module not in self._recipe.awaited:
            self._complete.append(weight.module)

    def _prepare(self, weight: RawWeight, *, fills: bool = True) -> None:
        """Give a raw weight its memory, with the elements that no tensor brings if it ``fills``."""
        weight.is_prepared = True
        if fills:
            with Dataflow.untraced():
                for to, of in self._rate_limit.cut(weight.tensor, weight.default.data):
                    to.copy_(of)

    # ---- the loader's operations, and those of finishing -------------------------------------

    def read(self, view: torch.Tensor) -> None:
        weight = self._raw_weights[memory_key(view)]
        if self._finishing:
            self._note_read(weight)
            return
        self._leave(weight)
        if not weight.written.has_view(view, weight.tensor.itemsize):
            raise Refused(
                f"the model's loader computes with {weight.name!r} before its elements are sent: "
                "send the tensors in the checkpoint's order. SGLANG_INFLIGHT_STAGING=off writes "
                "updates in place instead"
            )

    def _leave(self, weight: RawWeight) -> None:
        """Leave a planned module to the loader, which has to bring all of it.

        Finishing takes no part of a module.
        """
        if self._replay is None or (names := self._planned.pop(weight.module, None)) is None:
            return
        if any(self._replay.leave(names).values()):
            self._torn.add(weight.module)

    def _note_read(self, weight: RawWeight) -> None:
        """Note what ``post_load_weights`` reads. Raise ``Refused`` if that is not there.

        Planned weights are not there for any finishing.
        """
        self._refuse_planned(weight)
        if self._post_loading:
            if not weight.is_written:
                self._refuse(weight)
            self._read_modules.add(weight.module)

    def _refuse_planned(self, weight: RawWeight) -> None:
        if weight.module in self._planned:
            raise Refused(
                f"finishing the update uses {weight.name!r}, and finishing the served weights did "
                "not: SGLANG_INFLIGHT_STAGING=off writes updates in place"
            )

    # ---- finishing --------------------------------------------------------------------

    def finish_complete(self) -> None:
        """Finish the modules whose tensors have all come. Call between two of the loader's."""
        complete, self._complete = self._complete, []
        for path in dict.fromkeys(complete):
            if path not in self._done:
                self._finish_modules([path])

    def finish(self) -> None:
        """Finish the rest, at the seal. Raise ``Refused`` if tensors are missing for it."""
        there = self._done | self._planned.keys()
        paths = [path for path in self._modules if path not in there]
        if self._is_partial:
            written = {w.module for w in self._raw_weights.values() if w.is_written}
            self._show_live([path for path in paths if path not in written | self._torn])
            paths = [path for path in paths if path in written | self._torn]
        with Dataflow(self._targets, before_write=self.note_write, recorder=self):
            self._finish_modules(paths, at_seal=True)

    def _show_live(self, paths: list[str]) -> None:
        """Show ``post_load_weights`` the served weights of modules that the update leaves alone.

        They have the memory of the served tensors. A write to it raises ``Refused``.
        """
        for path in paths:
            for weight in self._of_module.get(path, ()):
                if weight.name not in self._recipe.untouched:
                    continue
                module, live = self._modules[path], self._live_modules[path]
                tensor = getattr(live, weight.attribute)
                if describe_layout(tensor) == describe_layout(weight.tensor):
                    is_buffer = weight.attribute in module._buffers
                    shown: dict[str, Any] = module._buffers if is_buffer else module._parameters
                    shown[weight.attribute] = _like(tensor, tensor.data)

    def _finish_modules(self, paths: list[str], *, at_seal: bool = False) -> None:
        with self._as_finishing():
            self._require_whole(paths)
            # ``post_load_weights`` makes nothing new of what was served
            if at_seal and not (self._is_partial and self._recipe.awaited.isdisjoint(paths)):
                self._require_room()
                self._post_load()
            self._make(paths, at_seal=at_seal)

    @contextmanager
    def _as_finishing(self) -> Iterator[None]:
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False

    def _make(self, paths: list[str], *, at_seal: bool) -> None:
        """Finish modules with complete raw weights, and hand the results on."""
        for path in paths:
            self._process(path)
        # not by a walk for each module: a model has thousands
        owners = (
            owners_of(self.model)
            if at_seal
            else (owner for path in paths for owner in owners_at(path, self._modules[path]))
        )
        self.take(self._made_by(owners, finished=set(paths)))
        self._restore(paths)
        for path in paths:
            for weight in self._of_module.get(path, ()):
                weight.reset()

    def _restore(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._raw[path].restore(self._modules[path])
            self._done.add(path)

    def _require_whole(self, paths: list[str]) -> None:
        """Complete raw weights with the elements that no tensor of the checkpoint reaches.

        They have the constructor's values. Raise ``Refused`` if other elements did not come.
        """
        for path in paths:
            for weight in self._of_module.get(path, ()):
                has_names = self._names_of(weight) <= weight.names
                # tensors of other names may have brought it
                if not has_names and len(weight.written) < weight.tensor.numel():
                    self._refuse(weight)
                if not weight.is_prepared:
                    self._prepare(weight)
                self._rate_limit.spend(3 * weight.tensor.nbytes)

    def _refuse(self, weight: RawWeight) -> None:
        missing = weight.tensor.numel() - len(weight.written)
        count = f"{missing} of {weight.tensor.numel()} elements of {weight.name!r} were not sent"
        names = sorted(self._names_of(weight) - weight.names)
        which = f"; not sent: {list_names(names)}" if names else ""
        together = sorted({n for w in self._of_module[weight.module] for n in self._names_of(w)})
        raise Refused(
            "the update is not complete: "
            f"{count if weight.is_written else f'{weight.name!r} was not sent'}"
            f"{which}. SGLang finishes {weight.module!r} as a whole after loading: send together "
            f"{list_names(together)}"
        )

    def _require_room(self) -> None:
        """Raise ``Refused`` if the device has no room for what ``post_load_weights`` takes at once.

        The weights that it reads are there, and all results, before the first result is handed on.
        Without room, a forward beside it may be what fails.
        """
        if self._device.type == "cpu" or not self._post_loaders:
            return
        # the other awaited modules are finished one by one
        read = self._recipe.awaited - self._recipe.deleted
        weights = (weight for path in read for weight in self._of_module.get(path, ()))
        needed = sum(weight.tensor.nbytes for weight in weights if weight.is_written)
        made = (
            tensor
            for place, tensor in tensors_of(self._live).items()
            if place in self._recipe.tensors and place.module not in self._of_module
        )
        needed += sum(storage.nbytes() for storage in distinct_storages(made))
        if (free := _free_bytes(self._device)) < needed:
            raise Refused(
                f"finishing the update needs {needed >> 20} MiB of {self._device} at once, and "
                f"{free >> 20} MiB are free: a smaller --mem-fraction-static leaves more"
            )

    def _post_load(self) -> None:
        self._is_post_loaded = True
        moves = self._device.type != "cpu" and bool(self._post_loaders)
        if moves:
            for module in self._modules.values():
                module._parameters = _OnDevice(module._parameters, self._move)
        self._post_loading = True
        try:
            for module in self._post_loaders:
                del module.post_load_weights
                module.post_load_weights()
        finally:
            self._post_loading = False
        if moves:
            for module in self._modules.values():
                module._parameters = dict(module._parameters.items())

    def _move(self, parameter: Any) -> None:
        """Move a raw weight to the device, until it is restored. Others stay where they are."""
        weight = None if parameter is None else self._raw_weights.get(memory_key(parameter))
        if weight is not None:
            data = _on(self._device, parameter.data)
            self._moved[memory_key(data)] = weight, data
            parameter.data = data

    def _process(self, path: str) -> None:
        module: Any = self._modules[path]
        if getattr(module, "quant_method", None) is not None:
            with device_loading_context(module, self._device):
                self._process_on_device(path, module)

    def _process_on_device(self, path: str, module: Any) -> None:
        module.quant_method.process_weights_after_loading(module)

    def _names_of(self, weight: RawWeight) -> frozenset[str]:
        return self._recipe.names.get(weight.name, frozenset())

    def _made_by(self, owners: Iterable[Owner], *, finished: set[str]) -> Made:
        """Return what differs from the raw model in ``owners``, of modules not handed on yet.

        What the recipe has in a module just ``finished`` counts as made in any case: finishing may
        have left the constructor's.
        """
        made = Made()
        for owner in owners:
            if owner.module in self._done and owner.module not in finished:
                continue
            is_finished = owner.module in finished
            for place, tensor in tensors_at(owner):
                made.present.add(place)
                known = is_finished and place in self._recipe.tensors
                if known or self._is_made(place, tensor):
                    made.tensors[place] = tensor
            for name, value in values_of(owner):
                at_name = Place(owner.module, owner.prefix + name)
                known = is_finished or self._has_post_loaded(owner.module)
                if (known and at_name in self._recipe.numbers) or self._is_new(at_name, value):
                    made.numbers[at_name] = value
        return made

    def _is_made(self, place: Place, tensor: torch.Tensor) -> bool:
        key = memory_key(tensor)
        if (weight := self._weight_in(key)) is not None:
            return bool(weight.names) or key in self._rewritten
        is_raw = self._raw_tensors.get(place) is tensor and key == self._raw_memory[place]
        return not is_raw or key in self._rewritten

    def _is_new(self, place: Place, value: Any) -> bool:
        return isinstance(value, bool | int | float) and self._raw_numbers.get(place) != value

    def _weight_in(self, memory: int) -> RawWeight | None:
        return self._moved[memory][0] if memory in self._moved else self._raw_weights.get(memory)

    def has_finished(self, module: str) -> bool:
        """Return whether this update has finished ``module``, by its path, or its children."""
        return module in self._done or self._has_post_loaded(module)

    def _has_post_loaded(self, module: str) -> bool:
        return self._is_post_loaded and module not in self._of_module


class _OnDevice(dict[str, Any]):
    """Parameters of a module. Who looks for one by name finds it on the device."""

    def __init__(self, parameters: Mapping[str, Any], move: Callable[[Any], None]) -> None:
        super().__init__(parameters)
        self._move = move

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        self._move(parameter)
        return parameter


def _on(device: torch.device, data: torch.Tensor) -> torch.Tensor:
    return data.to(device)


def _like(tensor: torch.Tensor, data: torch.Tensor) -> Any:
    """Return ``data`` as a tensor of the class of ``tensor``, with its attributes."""
    like = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    like.__dict__.update(tensor.__dict__)
    return like


class State:
    """The attributes of a raw module and of its tensors, and their memory.

    An update returns the module to them. The contents of tensors stay as finishing has left them:
    the next update fills raw weights, and ``Shadow.begin`` resets what is derived from them.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        self._attributes = dict(module.__dict__)
        self._tensors = [
            (tensor, tensor.data, dict(vars(tensor)))
            for owner in owners_at(path, module)
            for _, tensor in tensors_at(owner)
        ]

    def restore(self, module: nn.Module) -> None:
        module.__dict__.clear()
        module.__dict__.update(
            (name, copy.copy(value) if name in METHODS or type(value) in _COPIED else value)
            for name, value in self._attributes.items()
        )
        for tensor, data, attributes in self._tensors:
            tensor.data = data
            vars(tensor).clear()
            vars(tensor).update(attributes)


# finishing may change these in place; the tensors in them stay the same objects
_COPIED = (dict, list, set, OrderedDict)


def _outermost_with_post_load(model: nn.Module) -> list[Any]:
    found: list[Any] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if hasattr(module, "post_load_weights"):
            found.append(module)
        else:
            waiting += [child for child in module._modules.values() if child is not None]
    return found


def _free_bytes(device: torch.device) -> int:
    """Return the bytes that torch can still allocate, at most."""
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device) - module.memory_allocated(device))


def _wait_for_the_seal(*args: Any, **kwargs: Any) -> None:
    pass
