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
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from sglang.srt.model_loader.loader import device_loading_context
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_inflight.host_memory import pinned_bytes
from sglang_inflight.scheduler.update.attributes import METHODS
from sglang_inflight.scheduler.update.changes.handles import Handle
from sglang_inflight.scheduler.update.changes.intervals import Intervals
from sglang_inflight.scheduler.update.checks.dataflow import Dataflow, Kind, Target, Write
from sglang_inflight.scheduler.update.checks.dataflow import tensors_of as arguments_in
from sglang_inflight.scheduler.update.finished.kv_scales import is_kv_scale
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
from sglang_inflight.scheduler.update.plans.replay import Replay
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.shadow import Shadow, checksum
from sglang_inflight.storages import distinct_storages, memory_key
from sglang_inflight.vocabulary.errors import Refused, list_names

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")
# How bytes are altered: not in the highest bit, which may be a sign. numpy makes them, because a
# process that forks may import this, and torch's threads do not come through a fork.
_OTHER_BITS = torch.from_numpy((np.arange(1 << 16) * 37 % 127 + 1).astype(np.uint8))
_POSITIONS = (torch.bool, torch.int16, torch.int32, torch.int64)
_NUMBERS = (bool, int, float)


@dataclass
class Made:
    """Tensors and numbers that loading and finishing made of modules, by their places."""

    tensors: dict[Place, torch.Tensor] = field(default_factory=dict)
    numbers: dict[Place, Number] = field(default_factory=dict)
    # modules that were finished, and all tensors that they have now
    finished: set[str] = field(default_factory=set)
    present: set[Place] = field(default_factory=set)
    # weights that finishing has left as loaded, byte for byte; looked for in the proof
    kept: frozenset[str] = frozenset()


class Taker(Protocol):
    def take(self, made: Made) -> None:
        """Use the tensors of ``made``; they are valid during this call only."""


@dataclass
class _RawWeight:
    name: str
    module: str
    attribute: str
    tensor: torch.Tensor
    handle: Handle
    # its value without a checkpoint
    default: torch.Tensor
    names: set[str] = field(default_factory=set)
    # all that the update brought, though the module was finished since
    came: set[str] = field(default_factory=set)
    # the elements that the loader has written
    written: Intervals = field(default_factory=Intervals)
    is_written: bool = False
    # whether its memory has the elements that are not sent
    is_prepared: bool = False
    # whether elements that were not sent are those of the served weight
    is_filled: bool = False

    @property
    def place(self) -> Place:
        return Place(self.module, self.attribute)

    def reset(self) -> None:
        if self.is_prepared:
            self.handle.release()
        self.names.clear()
        self.written = Intervals()
        self.is_written = self.is_prepared = self.is_filled = False


class RawModel:
    """The raw weights of one model, of one update after the other. Used on the staging thread."""

    def __init__(
        self,
        pristine: nn.Module,
        live: nn.Module,
        device: torch.device,
        taker: Taker,
        rate_limit: RateLimit,
        recipe: Recipe | None,
    ) -> None:
        """``pristine`` is the model as constructed, ``live`` the one served.

        ``recipe`` is None while the served checkpoint is loaded to find it.
        """
        self._device = device
        self._taker = taker
        self._rate_limit = rate_limit
        self._recipe = recipe
        self._handles: dict[int, Handle] = {}
        self._shadow = Shadow(pristine, device, self._handle_for)
        self.model = self._shadow.model
        self._modules = dict(modules_of(self.model))
        self._live = live
        self._live_modules = dict(modules_of(live))
        self._weights = {
            memory_key(shadow): _RawWeight(
                name, *split_name(name), shadow, self._handles[memory_key(shadow)], default
            )
            for name, default, shadow in self._shadow.pairs
        }
        self._of_module: dict[str, list[_RawWeight]] = {}
        for weight in self._weights.values():
            self._of_module.setdefault(weight.module, []).append(weight)
        self._post_loaders = _outermost_with_post_load(self.model)
        self._raw = {path: _State(path, module) for path, module in self._modules.items()}
        self._raw_tensors = tensors_of(self.model)
        # each of them keeps the storage in ``_State``
        self._raw_memory = {place: memory_key(t) for place, t in self._raw_tensors.items()}
        self._twins = _Twins(device, self._weights)
        self._raw_numbers = {at: value for at, (_, _, value) in numbers_of(self.model).items()}
        self._targets: dict[int, Target] = {}
        self._complete: list[str] = []
        self._done: set[str] = set()
        # modules whose weights come by a plan, until the loader uses one; and these weights
        self._planned: dict[str, list[str]] = {}
        self._replay: Replay | None = None
        # memory written by finishing, and modules read by ``post_load_weights``
        self._finishing = self._post_loading = False
        # while modules are finished, and their results are handed on
        self._is_complete = False
        self._rewritten: set[int] = set()
        # checksums of raw tensors before their finishing
        self._before: dict[Place, str] = {}
        self.read_modules: set[str] = set()
        # modules whose weights finishing has looked at, in the proof
        self.looked_at: set[str] = set()
        self.is_partial = self.is_post_loaded = False

    def _handle_for(self, weight: torch.Tensor) -> torch.Tensor:
        handle = Handle(weight, is_watched=False)
        self._handles[memory_key(handle.tensor)] = handle
        return handle.tensor

    @property
    def nbytes(self) -> int:
        """Return the bytes of all raw weights."""
        return sum(weight.tensor.nbytes for weight in self._weights.values())

    @property
    def most_nbytes_finished(self) -> int:
        """Return the bytes on the host that finishing the largest module takes in the proof.

        It may replace all weights. SGLang brings results of a device back to the host, into pinned
        memory, which torch keeps beside the module's other content (``_try_other_content``).
        """
        size = _nbytes if self._device.type == "cpu" else _nbytes_and_pinned
        return max(
            (
                sum(size(weight.tensor) for weight in weights)
                for weights in self._of_module.values()
            ),
            default=0,
        )

    # ---- loading ----------------------------------------------------------------------

    def begin(
        self,
        live: Mapping[Place, torch.Tensor],
        *,
        is_partial: bool,
        replay: Replay | None = None,
    ) -> None:
        """Begin an update. ``is_partial``: tensors that are not sent keep their values.

        ``live``: all tensors of the live model. ``replay``: modules that its plan writes are staged
        past the loader, and not finished (``plannable.py``).
        """
        self.is_partial, self.is_post_loaded, self._is_complete = is_partial, False, False
        self.forget()
        self._replay = replay
        for name in replay.planned if replay is not None else ():
            self._planned.setdefault(split_name(name)[0], []).append(name)
        self._shadow.begin()
        self._targets = {
            memory_key(tensor): Target(Kind.SERVED, str(place)) for place, tensor in live.items()
        } | self._shadow.targets()
        for module in self._post_loaders:
            # the loader calls it after each piece of an update, where weights may be missing
            module.post_load_weights = _wait_for_the_seal

    def forget(self) -> None:
        """Give back the memory of the update's tensors, and make all modules raw."""
        for path, state in self._raw.items():
            state.restore(self._modules[path])
        for weight in self._weights.values():
            weight.reset()
            weight.came.clear()
        self._planned.clear()
        self._twins.clear()
        self._complete.clear()
        self._done.clear()
        self._rewritten.clear()
        self._before.clear()

    def targets(self) -> dict[int, Target]:
        """Return all memory in reach of the model's loader, by ``memory_key``."""
        return self._targets

    def note_write(self, write: Write) -> None:
        """Prepare a raw weight for a write, before the write."""
        self._shadow.note_write(write)
        weight = self._weights.get(write.memory)
        if self._finishing or weight is None:
            self._rewritten.add(write.memory)
            return
        if not weight.is_written:
            weight.is_written = True
            self._done.discard(weight.module)
        if not weight.is_prepared:
            is_whole = write.sets_all and write.view.nbytes == weight.tensor.nbytes
            self._prepare(weight, fills=not is_whole)
        if write.sets_all:
            weight.written.add_view(write.view, weight.tensor.itemsize)
        weight.names |= write.names
        weight.came |= write.names
        if weight.module not in self._done and self._has_all_names(weight.module):
            self._complete.append(weight.module)

    def _prepare(self, weight: _RawWeight, *, fills: bool = True) -> None:
        """Give a raw weight its memory, with the elements that no tensor brings if it ``fills``."""
        weight.is_prepared = True
        if fills:
            is_served = self.is_partial and self._is_kept(weight)
            other = self._live_tensor(weight) if is_served else weight.default
            with Dataflow.untraced():
                for to, of in self._rate_limit.cut(weight.tensor, other.data):
                    to.copy_(of)

    # ---- the loader's operations, and those of finishing -------------------------------------

    def read(self, view: torch.Tensor) -> None:
        weight = self._weights[memory_key(view)]
        if self._finishing:
            self._note_read(weight)
        if self._is_complete:
            return
        self._leave(weight)
        is_served = self.is_partial and self._is_kept(weight)
        if not is_served and not weight.written.has_view(view, weight.tensor.itemsize):
            raise Refused(
                f"the model's loader computes with {weight.name!r} before its elements are sent: "
                "send the tensors in the checkpoint's order. SGLANG_INFLIGHT_STAGING=off writes "
                "updates in place instead"
            )
        if not weight.is_prepared:
            self._prepare(weight)

    def copy(self, to: torch.Tensor, of: torch.Tensor, *, is_received: bool) -> bool:
        return False

    def write(self, view: torch.Tensor, *, sets_all: bool, reads: bool) -> None:
        weight = self._weights[memory_key(view)]
        if self._finishing:
            self._refuse_planned(weight)
        elif not self._is_complete:
            self._leave(weight)

    def _leave(self, weight: _RawWeight) -> None:
        """Leave a planned module to the loader, which has to bring all of it.

        Finishing takes no part of a module.
        """
        if self._replay is None or (names := self._planned.pop(weight.module, None)) is None:
            return
        came = self._replay.leave(names)
        for other in self._of_module[weight.module]:
            other.came.update(came.get(other.name, ()))

    def _has_all_names(self, module: str) -> bool:
        if self._recipe is None or module in self._recipe.awaited:
            return False
        # a tensor that the served checkpoint has not may have others beside it
        return all(self._names_of(w) == w.names for w in self._of_module[module])

    def finish_complete(self) -> None:
        """Finish the modules whose tensors have all come. Call between two of the loader's."""
        complete, self._complete = self._complete, []
        self._is_complete = True
        for path in dict.fromkeys(complete):
            if path not in self._done:
                self._finish_modules([path])
        self._is_complete = False

    # ---- finishing --------------------------------------------------------------------

    def finish(self) -> None:
        """Finish the rest, at the seal. Raise ``Refused`` if tensors are missing for it."""
        self._is_complete = True
        there = self._done | self._planned.keys()
        paths = [path for path in self._modules if path not in there]
        if self._recipe is None:
            # loading deletes modules of some models, and nothing is made of those
            present = {path for path, _ in modules_of(self.model)}
            paths = [path for path in paths if path in present]
        if self.is_partial:
            touched = {w.module for w in self._weights.values() if w.is_written or w.came}
            self._show_live([path for path in paths if path not in touched])
            paths = [path for path in paths if path in touched]
        with Dataflow(self._targets, before_write=self.note_write, recorder=self):
            self._finish_modules(paths, at_seal=True)

    def _show_live(self, paths: list[str]) -> None:
        """Show ``post_load_weights`` the served weights of modules that the update leaves alone.

        They have the memory of the served tensors. A write to it raises ``Refused``.
        """
        for path in paths:
            for weight in self._of_module.get(path, ()):
                if self._is_kept(weight):
                    module, live = self._modules[path], self._live_modules[path]
                    is_buffer = weight.attribute in module._buffers
                    shown: dict[str, Any] = module._buffers if is_buffer else module._parameters
                    tensor = getattr(live, weight.attribute)
                    shown[weight.attribute] = _like(tensor, tensor.data)

    def _finish_modules(self, paths: list[str], *, at_seal: bool = False) -> None:
        for path in paths:
            for weight in self._of_module.get(path, ()):
                self._fill(weight)
                self._rate_limit.spend(3 * weight.tensor.nbytes)
        self._note_bytes(paths)
        if at_seal and self._is_awaited(paths):
            self._require_room()
            self._finishing = True
            try:
                self._post_load()
            finally:
                self._finishing = False
        if self._recipe is None:
            # the results of one module alone take memory beside the raw weights
            for path in paths:
                self._make([path], at_seal=False)
        else:
            self._make(paths, at_seal=at_seal)

    def _make(self, paths: list[str], *, at_seal: bool) -> None:
        """Finish modules with complete raw weights, and hand the results on."""
        # one module at a time in the proof
        loaded = [*self._numbers_at(paths[0])] if self._recipe is None else []
        self._finishing = True
        try:
            for path in paths:
                self._process(path)
        finally:
            self._finishing = False
        for path in paths:
            for weight in self._of_module.get(path, ()):
                # finishing left it alone before, which may have hung on its numbers
                if weight.is_filled and not self._is_left_alone(weight):
                    self._refuse(weight, self._names_of(weight) - weight.names)
        # not by a walk for each module: a model has thousands
        owners = (
            owners_of(self.model)
            if at_seal
            else (owner for path in paths for owner in owners_at(path, self._modules[path]))
        )
        made = self._made_by(owners, finished=set(paths))
        if self._recipe is not None:
            self._refuse_unsent_scales(made)
        else:
            made.kept = self._kept(paths)
        self._taker.take(made)
        for path in paths:
            self._raw[path].restore(self._modules[path])
            self._done.add(path)
            if self._recipe is None:
                # others may share its raw weights, and nothing is known of that yet
                self._try_other_content(path, made, loaded)
                continue
            for weight in self._of_module.get(path, ()):
                weight.reset()

    def _note_bytes(self, paths: list[str]) -> None:
        """Note the bytes of what finishing must leave alone, or may change without being seen.

        An update brings a part of the former. The proof looks at every raw tensor.
        """
        if self._recipe is not None:
            filled = (w for path in paths for w in self._of_module.get(path, ()) if w.is_filled)
            noted: Iterable[tuple[Place, torch.Tensor]] = ((w.place, w.tensor) for w in filled)
        else:
            noted = (
                found
                for path in paths
                for owner in owners_at(path, self._modules[path])
                for found in tensors_at(owner)
            )
        for place, tensor in noted:
            self._before[place] = self._checksum_of(tensor)

    def _checksum_of(self, tensor: torch.Tensor) -> str:
        self._rate_limit.spend(tensor.nbytes)
        with Dataflow.untraced():
            return checksum([tensor])

    def _has_other_bytes(self, place: Place, tensor: torch.Tensor) -> bool:
        before = self._before.get(place)
        return before is not None and self._checksum_of(tensor) != before

    def _is_awaited(self, paths: list[str]) -> bool:
        """Return whether ``post_load_weights`` makes something new."""
        if self.is_partial and self._recipe is not None:
            return not self._recipe.awaited.isdisjoint(paths)
        return True

    def _require_room(self) -> None:
        """Raise ``Refused`` if the device has no room for what ``post_load_weights`` takes at once.

        The weights that it reads are there, and all results, before the first result is handed on.
        Without room, a forward beside it may be what fails.
        """
        if self._recipe is None or self._device.type == "cpu" or not self._post_loaders:
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
        self.is_post_loaded = True
        moves = self._device.type != "cpu" and bool(self._post_loaders)
        if moves:
            for module in self._modules.values():
                module._parameters = _OnDevice(module._parameters, self._twins)
        self._post_loading = True
        try:
            for module in self._post_loaders:
                del module.post_load_weights
                module.post_load_weights()
        finally:
            self._post_loading = False
        if moves:
            for module in self._modules.values():
                module._parameters = self._twins.in_place_of(module._parameters)

    def _process(self, path: str) -> None:
        module: Any = self._modules[path]
        method = getattr(module, "quant_method", None)
        if method is not None:
            with device_loading_context(module, self._device), self._noting_looks(path):
                method.process_weights_after_loading(module)

    def _numbers_at(self, path: str) -> Iterator[tuple[str, str, Number]]:
        """Yield the numbers that loading has made in a module, each with its owner's prefix."""
        for owner in owners_at(path, self._modules[path]):
            for name, value in values_of(owner):
                place = Place(owner.module, owner.prefix + name)
                if isinstance(value, _NUMBERS) and self._raw_numbers.get(place) != value:
                    yield owner.prefix, name, value

    def _try_other_content(
        self, path: str, made: Made, loaded: Iterable[tuple[str, str, Number]]
    ) -> None:
        """Note, in the proof, whether finishing does something else with other content.

        Kernels outside of torch's dispatcher are not seen when they look at it. ``made``: of the
        served content, which is handed on. Its tensors are given back. ``loaded``: the numbers
        that were there before it was finished.
        """
        module, places = self._modules[path], {*made.tensors}
        made.tensors.clear()
        weights = [weight for weight in self._of_module.get(path, ()) if weight.names]
        if path in self.looked_at or any(w.name not in made.kept for w in weights):
            return
        if not weights or getattr(module, "quant_method", None) is None:
            return
        for weight in weights:
            tensor = getattr(module, weight.attribute)
            tensor.data = self._altered(tensor.data)
        owners = {owner.prefix: owner.object for owner in owners_at(path, module)}
        for prefix, name, number in loaded:
            if prefix in owners:
                setattr(owners[prefix], name, number)
        before = [self._checksum_of(getattr(module, w.attribute)) for w in weights]
        self._finishing = True
        try:
            self._process(path)
            again = self._made_by(owners_at(path, module), finished={path})
            after = [self._checksum_of(getattr(module, w.attribute)) for w in weights]
            is_same = (after, again.numbers, {*again.tensors}) == (before, made.numbers, places)
        except Exception:
            logger.debug("%s is not finished with other content", path, exc_info=True)
            is_same = False
        finally:
            self._finishing = False
            self._raw[path].restore(module)
        if not is_same:
            self.looked_at.add(path)

    def _altered(self, data: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``data`` with other bits: large and small numbers, and few NaN.

        Positions stay as they are: a kernel may use them.
        """
        with Dataflow.untraced():
            altered = data.detach().clone()
            if altered.dtype in _POSITIONS:
                return altered
            flat = altered.as_strided((altered.numel(),), (1,)).view(torch.uint8)
            for piece in flat.split(len(_OTHER_BITS)):
                piece.bitwise_xor_(_OTHER_BITS[: len(piece)])
                # a comparison with NaN is false, whatever finishing looks for
                piece.bitwise_xor_(((piece & 0x7C) == 0x7C).to(torch.uint8) << 6)
                self._rate_limit.spend(piece.nbytes)
        return altered

    @contextmanager
    def _noting_looks(self, path: str) -> Iterator[None]:
        """Note, in the proof, of which modules finishing ``path`` takes more than the memory.

        The weights of ``path`` are on the device meanwhile.
        """
        if self._recipe is not None:
            yield
            return
        module = self._modules[path]
        named = (*module.named_parameters(prefix=path), *module.named_buffers(prefix=path))
        there = {memory_key(tensor): split_name(name)[0] for name, tensor in named}
        with _Looks() as looks:
            yield
        for memory in looks.memory:
            if memory in there:
                self.looked_at.add(there[memory])
            elif (weight := self._weights.get(memory)) is not None:
                self.looked_at.add(weight.module)

    def _fill(self, weight: _RawWeight) -> None:
        """Complete a raw weight that the update wrote in part or not at all.

        Elements that no tensor of the checkpoint reaches have the constructor's values. Raise
        ``Refused`` if others did not come, and their loaded form is gone.
        """
        needed = self._names_of(weight)
        missing = weight.tensor.numel() - len(weight.written)
        is_whole = self._recipe is None or needed <= weight.names or not missing
        # what came and is not here was staged already, and the served elements would replace it
        is_here = is_whole or weight.came <= weight.names
        keeps = self.is_partial and self._is_kept(weight) and is_here
        weight.is_filled = keeps and not is_whole
        if not weight.is_written:
            if needed and not keeps:
                self._refuse(weight, needed)
        elif not is_whole and not keeps:
            self._refuse(weight, needed - weight.names, missing)
        if not weight.is_prepared:
            self._prepare(weight)

    def _refuse(self, weight: _RawWeight, names: Iterable[str], missing: int = 0) -> None:
        count = f"{missing} of {weight.tensor.numel()} elements of {weight.name!r} were not sent"
        which = f"; not sent: {list_names(sorted(names))}" if names else ""
        together = sorted({n for w in self._of_module[weight.module] for n in self._names_of(w)})
        raise Refused(
            f"the update is not complete: {count if missing else f'{weight.name!r} was not sent'}"
            f"{which}. SGLang finishes {weight.module!r} after loading, and its loaded form is "
            f"gone: send together {list_names(together)}"
        )

    def _refuse_unsent_scales(self, made: Made) -> None:
        """Raise ``Refused`` if no KV scale came for a layer that is served with another than 1.

        An earlier update has brought that scale. SGLang takes 1 where it finds none.
        """
        for place, number in made.numbers.items():
            if not is_kv_scale(place) or any(w.names for w in self._of_module[place.module]):
                continue
            live = getattr(self._live_modules[place.module], place.attribute)
            if number != live:
                raise Refused(
                    f"the update is not complete: {str(place)!r} is {live}, and no scale of this "
                    f"layer was sent, for which SGLang takes {number}: send its k_scale and v_scale"
                )

    def _names_of(self, weight: _RawWeight) -> frozenset[str]:
        return (
            frozenset()
            if self._recipe is None
            else self._recipe.names.get(weight.name, frozenset())
        )

    def _is_kept(self, weight: _RawWeight) -> bool:
        return self._recipe is not None and weight.name in self._recipe.kept

    def _live_tensor(self, weight: _RawWeight) -> torch.Tensor:
        live: torch.Tensor = getattr(self._live_modules[weight.module], weight.attribute)
        return live.data

    def _made_by(self, owners: Iterable[Owner], *, finished: set[str]) -> Made:
        """Return what differs from the raw model in ``owners``, of modules not handed on yet.

        A number of a module just ``finished`` counts as made in any case: finishing may have left
        the constructor's.
        """
        made = Made(finished=finished)
        recipe = self._recipe.numbers if self._recipe is not None else frozenset()
        for owner in owners:
            if owner.module in self._done and owner.module not in finished:
                continue
            for place, tensor in tensors_at(owner):
                made.present.add(place)
                if self._is_made(place, tensor, is_finished=owner.module in finished):
                    made.tensors[place] = tensor
            for name, value in values_of(owner):
                at_name = Place(owner.module, owner.prefix + name)
                is_new = isinstance(value, _NUMBERS) and self._raw_numbers.get(at_name) != value
                is_finished = owner.module in finished or self._has_post_loaded(owner.module)
                if is_new or (is_finished and at_name in recipe):
                    made.numbers[at_name] = value
        return made

    def _is_made(self, place: Place, tensor: torch.Tensor, *, is_finished: bool) -> bool:
        key = memory_key(tensor)
        weight = self._weights.get(key) or self._twins.weights.get(key)
        if weight is None:
            raw = self._raw_tensors.get(place)
            if raw is not tensor or key != self._raw_memory[place]:
                return True
        elif weight.names:
            return True
        if key in self._rewritten:
            return True
        if self._recipe is None:
            return self._has_other_bytes(place, tensor)
        return is_finished and place in self._recipe.tensors

    # ---- for the proof ----------------------------------------------------------------

    def has_finished(self, module: str) -> bool:
        """Return whether this update has finished ``module``, by its path, or its children."""
        return module in self._done or self._has_post_loaded(module)

    def _has_post_loaded(self, module: str) -> bool:
        return self.is_post_loaded and module not in self._of_module

    def names(self) -> dict[str, frozenset[str]]:
        """Return the tensors that each raw weight was written from in this update."""
        return {w.name: frozenset(w.names) for w in self._weights.values() if w.names}

    def reached(self) -> set[Place]:
        """Return the places of raw weights that the checkpoint was loaded into, and of views."""
        return {
            place
            for place, memory in self._raw_memory.items()
            if memory in self._weights and self._weights[memory].names
        }

    def _kept(self, modules: Iterable[str]) -> frozenset[str]:
        """Return the weights of ``modules`` that finishing has just left as loaded."""
        return frozenset(
            weight.name
            for module in modules
            for weight in self._of_module.get(module, ())
            if weight.names and self._is_left_alone(weight)
        )

    def _is_left_alone(self, weight: _RawWeight) -> bool:
        tensor = getattr(self._modules[weight.module], weight.attribute, None)
        if not isinstance(tensor, torch.Tensor):
            return False
        key = memory_key(tensor)
        return (
            (self._weights.get(key) or self._twins.weights.get(key)) is weight
            and describe_layout(tensor) == describe_layout(weight.handle.tensor)
            and not self._has_other_bytes(weight.place, tensor)
        )

    def _note_read(self, weight: _RawWeight) -> None:
        """Note what ``post_load_weights`` reads. Raise ``Refused`` if that is not there.

        Planned weights are not there for any finishing.
        """
        self._refuse_planned(weight)
        if self._post_loading:
            if not weight.is_written:
                self._refuse(weight, self._names_of(weight))
            self.read_modules.add(weight.module)

    def _refuse_planned(self, weight: _RawWeight) -> None:
        if weight.module in self._planned:
            raise Refused(
                f"finishing the update uses {weight.name!r}, and finishing the served weights did "
                "not: SGLANG_INFLIGHT_STAGING=off writes updates in place"
            )


class _Looks(TorchDispatchMode):
    """Notes the memory of all tensors that operations take, other than for a view."""

    def __init__(self) -> None:
        super().__init__()
        # keys of ``memory_key``
        self.memory: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            for value in (*args, *kwargs.values()):
                self.memory.update(memory_key(tensor) for tensor in arguments_in(value))
        return func(*args, **kwargs)


class _Twins:
    """Copies of raw weights on the device, where ``post_load_weights`` computes with them.

    Each is made once, and stays in the place of its raw weight until the result is handed on: it
    may have been written, by any kernel.
    """

    def __init__(self, device: torch.device, raw: Mapping[int, _RawWeight]) -> None:
        """``raw``: the raw weights by their memory."""
        self._device = device
        self._raw = raw
        # copies and their memory, which is kept, by the id of the raw parameter
        self._copies: dict[int, tuple[Any, torch.Tensor]] = {}
        # the raw weights by their copy's memory
        self.weights: dict[int, _RawWeight] = {}

    def of(self, parameter: Any) -> Any:
        """Return the copy of a raw weight; ``parameter`` itself if it is none."""
        if parameter is None or (weight := self._raw.get(memory_key(parameter))) is None:
            return parameter
        if id(parameter) not in self._copies:
            data = _on(self._device, parameter.data)
            self._copies[id(parameter)] = _like(parameter, data), data
            self.weights[memory_key(data)] = weight
        return self._copies[id(parameter)][0]

    def in_place_of(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``parameters`` with the copies that were made in place of the raw weights."""
        return {
            name: self._copies[id(raw)][0] if id(raw) in self._copies else raw
            for name, raw in parameters.items()
        }

    def clear(self) -> None:
        self._copies.clear()
        self.weights.clear()


class _OnDevice(dict[str, Any]):
    """Parameters that are seen on the device by who looks for them by name."""

    def __init__(self, parameters: Mapping[str, Any], twins: _Twins) -> None:
        super().__init__(parameters)
        self._twins = twins

    def __getitem__(self, name: str) -> Any:
        return self._twins.of(super().__getitem__(name))


def _on(device: torch.device, data: torch.Tensor) -> torch.Tensor:
    return data.to(device)


def _like(tensor: torch.Tensor, data: torch.Tensor) -> Any:
    """Return ``data`` as a tensor of the class of ``tensor``, with its attributes."""
    like = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    like.__dict__.update(tensor.__dict__)
    return like


class _State:
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


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes


def _nbytes_and_pinned(tensor: torch.Tensor) -> int:
    return tensor.nbytes + pinned_bytes(tensor)


def _wait_for_the_seal(*args: Any, **kwargs: Any) -> None:
    pass
