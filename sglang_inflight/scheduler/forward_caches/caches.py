"""Find tensors that forwards derive from weights and cache: no list of them is complete.

A module may stack, convert or multiply weights at its first forward, and use the result from then
on. A commit exchanges weights and not such results. So a model's attributes are noted after loading
and compared with later ones.

    what a forward did                            what happens at a commit
    it set an attribute that was unset            the attribute is unset again, with the values set
                                                  beside it: the next forward makes it anew
    the same, and captured CUDA graphs hold it    updates are refused by name
    it replaced or overwrote a tensor             updates are refused by name

A tensor in which a request takes part is a workspace, and stays. ``Provenance`` tells the two apart
during the first forwards, unless CUDA graphs were captured: then the first forwards were the
capture's, and watching a capture might change it. Without this knowledge a floating tensor counts
as made of weights.

Not found: tensors outside of the model's modules, such as in globals, in a closure or in a worker's
helper; numbers that an unwatched forward reads from weights; and weights that it overwrites.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from sglang_inflight.scheduler.forward_caches.provenance import Origin, Provenance
from sglang_inflight.scheduler.forward_caches.settled import Settled
from sglang_inflight.scheduler.forward_caches.sizes import Sizes
from sglang_inflight.scheduler.forward_caches.values import (
    PLAIN,
    attributes_of_object,
    is_container,
    is_empty,
    is_opaque,
    is_plain,
    tensors_within,
)
from sglang_inflight.scheduler.update.attributes import (
    modules_of,
    namespaces_of,
    tensors_in,
    values_in,
)
from sglang_inflight.scheduler.update.rate import yield_gil
from sglang_inflight.scheduler.update.shadow import checksum, weights_of
from sglang_inflight.storages import memory_key

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Watching waits for the first prefill and the first decode, and ends after so many forwards.
MOST_FORWARDS = 64


class _Unset:
    """Stands for the value of an attribute that does not exist."""


_UNSET = _Unset()


class _Value(NamedTuple):
    """A value as it was noted."""

    # its tensors without weights: held, so that they stay distinct from later ones
    tensors: tuple[torch.Tensor, ...]
    # the value itself if it has no tensors: plain, an empty container, or ``_UNSET``
    plain: Any
    # whether ``plain`` can be set again
    is_plain: bool


_NOTHING = _Value((), _UNSET, is_plain=True)
_Key = tuple[int, str]


class _Slot(NamedTuple):
    """An attribute of a module, or of the module's method of quantization."""

    path: str
    module: nn.Module
    namespace: dict[str, Any]
    name: str
    has_weights: bool

    @property
    def key(self) -> _Key:
        return id(self.namespace), self.name

    def __str__(self) -> str:
        return f"{self.name!r} of {self.path or 'the model'} ({type(self.module).__name__})"


class Attributes(NamedTuple):
    """The attributes of a model at one time, by namespace and name."""

    values: dict[_Key, _Value]
    # checksums of tensors beside weights
    checksums: dict[_Key, str]

    def get(self, slot: _Slot) -> _Value:
        return self.values.get(slot.key, _NOTHING)


class Watched(NamedTuple):
    """A watched forward: where its tensors come from, and the attributes before it."""

    origins: Provenance
    before: Attributes


class ForwardCaches:
    """Tensors that forwards of one model have derived from its weights and cached.

    The scheduler's thread watches forwards and resets attributes. The staging thread searches,
    too, so a lock guards each search. A reset sets attributes between two steps, and cannot fail.
    """

    def __init__(self, model: nn.Module) -> None:
        """Note the attributes of ``model``. Call after its loading, before any forward."""
        self._model = model
        self._lock = threading.Lock()
        self._judged: set[_Key] = set()
        # what to set at a commit, by the tensor's slot
        self._resets: dict[_Key, list[tuple[_Slot, Any]]] = {}
        self._refusals: dict[_Key, str] = {}
        self._has_searched = False
        # None until a search has looked at everything
        self._settled: Settled[_Slot] | None = None
        # resets made so far, to tell a search of the staging thread that one came beside it
        self._times_reset = 0
        self._note()

    def _note(self) -> None:
        self._weights = {name for name, _ in weights_of(self._model)}
        # modules by id: held, so that their ids stay unique. A forward may make others
        self._modules = {id(module): module for module in self._model.modules()}
        self._noted = self.attributes()
        # objects by id: held, as the modules are
        self._objects = {id(value): value for _, value in self._slots() if is_opaque(value)}
        self._sizes = self._measure()
        self._settled = None

    def end_start(self, runner: ModelRunner, *, holds_graphs: bool) -> None:
        """Find what graphs hold, or watch the first forwards. Call when the server has started.

        Before the first forward, SGLang itself sets attributes while it starts.
        """
        if holds_graphs:
            self.find(in_graphs=True)
        elif runner.forward_pass_id:
            self.find()
        else:
            self._note()
        if not holds_graphs:
            Watch(self, runner)

    def note_loaded(self) -> None:
        """Note what SGLang set by loading the model in place, while no forward ran."""
        with self._lock:
            self._weights = {name for name, _ in weights_of(self._model)}
            self._modules |= {id(module): module for module in self._model.modules()}
            for key, value in self.attributes().values.items():
                if key not in self._judged:
                    self._noted.values[key] = value
            self._sizes = self._measure()
            self._settled = None

    def why_not_updated(self, *, searches: bool = True) -> str | None:
        """Return why no update may come now, by the name of a tensor, or None.

        ``searches`` is false where an earlier answer will do: another one follows.
        """
        if searches or not self._has_searched:
            self.find()
            self._has_searched = True
        return next(iter(self._refusals.values()), None)

    def reset(self) -> None:
        """Unset what forwards made of the weights. Call at a commit, between two steps.

        Only modules in which a forward has set something are searched.
        """
        sizes = self._sizes
        self._times_reset += 1
        if grown := sizes.find_grown():
            self._find_in(sizes, grown)
        for resets in tuple(self._resets.values()):
            for slot, value in resets:
                if value is _UNSET:
                    slot.namespace.pop(slot.name, None)
                else:
                    slot.namespace[slot.name] = type(value)() if is_container(value) else value
                sizes.follow(slot.namespace)

    def find(self, watched: Watched | None = None, *, in_graphs: bool = False) -> None:
        """Judge each tensor made since the last search. ``in_graphs``: CUDA graphs hold it.

        The search after a watched forward is not interrupted. Another one looks first at what has
        changed: a model has some ten thousand attributes.
        """
        settled = self._settled
        if watched is not None or in_graphs or settled is None:
            self._find_everywhere(watched, in_graphs=in_graphs)
        elif settled.is_as_before(self._judged):
            self._find_in_others(settled)
        else:
            self._find_everywhere(None, in_graphs=False)

    def _find_everywhere(self, watched: Watched | None, *, in_graphs: bool) -> None:
        # a view of a noted tensor shows what the commit exchanges there
        keys = self.memory_after_loading()
        # before the walk: a forward may set an attribute where the walk has been
        sizes, times_reset = self._measure(), self._times_reset
        settled = Settled[_Slot](sizes.namespaces)
        with self._lock:
            known = {id(t) for value in self._noted.values.values() for t in value.tensors}
            module = None
            for slot, value in self._slots():
                if watched is None and slot.module is not module:
                    module = slot.module
                    self._yield_gil()
                if slot.key in self._judged:
                    continue
                if is_plain(value):
                    settled.hold(value)
                    # a number counts if a watched forward has set it
                    if watched is None:
                        continue
                elif id(value) in known or id(value) in self._objects or self._is_bound(value):
                    settled.hold(value)
                    continue
                elif not self._is_weight(slot):
                    settled.others.append(slot)
                self._judge(slot, _noted(value, keys), watched, in_graphs=in_graphs)
            if watched is not None:
                self._judge_overwritten(watched.before, watched.origins)
            elif in_graphs:
                self._judge_overwritten(self._noted, None)
            # a reset has followed its changes in the sizes that were there
            if self._times_reset == times_reset:
                self._sizes = sizes
            self._settled = settled

    def _find_in_others(self, settled: Settled[_Slot]) -> None:
        """Judge the tensors in attributes that may hold new ones while they stay the same."""
        sizes, times_reset = self._sizes, self._times_reset
        if sizes.find_grown():
            # what was judged, and containers of other things
            sizes = self._measure()
        keys: set[int] | None = None
        # many modules have the model's configuration
        without: dict[int, Any] = {}
        with self._lock:
            for at, slot in enumerate(settled.others):
                if not at % 64:
                    self._yield_gil()
                value = slot.namespace.get(slot.name)
                if slot.key in self._judged or id(value) in without:
                    continue
                if next(tensors_within(value), None) is None:
                    without[id(value)] = value
                    continue
                if self._is_as_loaded(slot, value):
                    continue
                keys = self.memory_after_loading() if keys is None else keys
                self._judge(slot, _noted(value, keys), None, in_graphs=False)
            if self._times_reset == times_reset:
                self._sizes = sizes

    def _find_in(self, sizes: Sizes, grown: Iterable[int]) -> None:
        """Judge the tensors in the modules whose namespaces have ``grown``."""
        keys: set[int] | None = None
        modules = {id(sizes.owners[at][1]): sizes.owners[at] for at in grown}
        with self._lock:
            for path, module in modules.values():
                for slot, value in self._slots_of(path, module, set(), with_plain=False):
                    if slot.key in self._judged or self._is_as_loaded(slot, value):
                        continue
                    # once for each attribute that a forward sets between a seal and its commit
                    keys = self.memory_after_loading() if keys is None else keys
                    self._judge(slot, _noted(value, keys), None, in_graphs=False)
        for at in grown:
            sizes.follow(sizes.namespaces[at])

    def _is_as_loaded(self, slot: _Slot, value: Any) -> bool:
        """Return whether ``value`` is a noted weight, or has the tensors that loading made."""
        if self._is_weight(slot):
            return True
        noted = self._noted.get(slot).tensors
        return all(any(t is known for known in noted) for t in tensors_within(value))

    def _is_bound(self, value: Any) -> bool:
        return isinstance(value, types.MethodType) and id(value.__self__) in self._modules

    def _is_weight(self, slot: _Slot) -> bool:
        return slot.namespace is slot.module._parameters and _join(slot) in self._weights

    def _yield_gil(self) -> None:
        """Let steps run, and searches of the loop: those judge a slot as this one would."""
        self._lock.release()
        try:
            yield_gil()
        finally:
            self._lock.acquire()

    def attributes(self) -> Attributes:
        """Return the present attributes."""
        keys = self._weight_keys()
        values: dict[_Key, _Value] = {}
        checksums: dict[_Key, str] = {}
        for slot, value in self._slots():
            noted = values[slot.key] = _noted(value, keys)
            if noted.tensors and slot.has_weights:
                checksums[slot.key] = checksum(noted.tensors)
        return Attributes(values, checksums)

    def known_tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors that count as weights, and those that count as constants.

        A tensor beside a module's weights may be computed from them. A module without weights has
        constants, such as rotary tables.
        """
        weights = [weight for _, weight in weights_of(self._model)]
        constants: list[torch.Tensor] = []
        keys = self._weight_keys()
        for slot, value in self._slots():
            (weights if slot.has_weights else constants).extend(_noted(value, keys).tensors)
        return weights, constants

    def memory_after_loading(self) -> set[int]:
        """Return the memory of all tensors that loading made, by ``memory_key``."""
        noted = (tensor for value in self._noted.values.values() for tensor in value.tensors)
        return self._weight_keys().union(map(memory_key, noted))

    def _judge(self, slot: _Slot, now: _Value, watched: Watched | None, *, in_graphs: bool) -> None:
        """Judge the tensors of ``now``, which loading did not make."""
        noted = self._noted.get(slot)
        is_number = watched is not None and _is_new_number(slot, now, watched)
        if not now.tensors and not is_number:
            return
        self._judged.add(slot.key)
        origins = None if watched is None else watched.origins
        was_set = bool(noted.tensors)
        if not is_number and not any(
            _is_of_weights(t, slot, origins, was_set) for t in now.tensors
        ):
            return
        is_remade = noted.is_plain and not isinstance(noted.plain, float)
        if not is_remade:
            self._refuse(slot, f"a forward replaces {slot} by what it makes of weights")
        elif in_graphs:
            self._refuse(
                slot, f"a forward makes {slot} of weights, and captured CUDA graphs hold it"
            )
        else:
            before = self._noted if watched is None else watched.before
            beside = self._set_beside(slot, before, all_changes=watched is not None)
            self._resets[slot.key] = [(slot, noted.plain), *beside]
            logger.info("Each commit unsets %s, because a forward makes it of weights.", slot)

    def _set_beside(
        self, made: _Slot, before: Attributes, *, all_changes: bool
    ) -> Iterator[tuple[_Slot, Any]]:
        """Yield the plain values that were set together with a tensor, as they were ``before``.

        A module's own mark that a tensor is made must go together with the tensor. Without
        ``all_changes`` only marks count that were False, None or unset.
        """
        for slot, value in self._slots_of(made.path, made.module, set()):
            if slot.name == made.name:
                continue
            was = before.get(slot)
            if not (is_plain(value) and was.is_plain) or was.plain == value:
                continue
            if all_changes or was.plain is _UNSET or was.plain in (False, None):
                yield slot, was.plain
        # a parameter or a module that replaced a plain attribute has removed it
        for _, namespace in namespaces_of(made.module):
            slot = made._replace(namespace=namespace)
            was = self._noted.get(slot)
            if made.name not in namespace and was.is_plain and was.plain is not _UNSET:
                yield slot, was.plain

    def _judge_overwritten(self, before: Attributes, origins: Provenance | None) -> None:
        written = {} if origins is None else origins.written
        for slot, _ in self._slots():
            tensors = before.get(slot).tensors
            if not tensors or slot.key in self._judged:
                continue
            seen = [written[key] for key in map(memory_key, tensors) if key in written]
            known = before.checksums.get(slot.key)
            if not seen and (known is None or checksum(tensors) == known):
                continue
            self._judged.add(slot.key)
            origin = functools.reduce(operator.or_, seen or [Origin.UNKNOWN])
            if any(map(torch.is_floating_point, tensors)) and _counts(origin, tensors):
                self._refuse(slot, f"a forward overwrites {slot}, perhaps by what weights give")
        for name, weight in weights_of(self._model):
            origin = written.get(memory_key(weight), Origin.CONSTANTS)
            if weight.is_floating_point() and _counts(origin, (weight,)):
                self._refusals[0, name] = f"a forward overwrites the weight {name!r}{_OUTDATED}"

    def _refuse(self, slot: _Slot, why: str) -> None:
        self._refusals[slot.key] = f"{why}{_OUTDATED}"
        logger.warning("Weights cannot be updated: %s.", self._refusals[slot.key])

    def _slots(self, *, with_plain: bool = True) -> Iterator[tuple[_Slot, Any]]:
        """Yield each attribute with its value, or only the ones that may hold tensors."""
        seen: set[int] = set()
        for path, module in modules_of(self._model):
            yield from self._slots_of(path, module, seen, with_plain=with_plain)

    def _slots_of(
        self, path: str, module: nn.Module, seen: set[int], *, with_plain: bool = True
    ) -> Iterator[tuple[_Slot, Any]]:
        """Yield the attributes of one module. Namespaces in ``seen`` are another's, too."""
        if id(module) not in self._modules:
            return
        has_weights: bool | None = None
        for part, namespace in namespaces_of(module):
            if id(namespace) in seen:
                continue
            seen.add(id(namespace))
            where = f"{path}.{part}".strip(".")
            for name, value in values_in(namespace):
                if (not with_plain and type(value) in PLAIN) or id(value) in self._modules:
                    continue
                if has_weights is None:
                    has_weights = next(module.parameters(), None) is not None
                yield _Slot(where, module, namespace, name, has_weights), value

    def _weight_keys(self) -> set[int]:
        """Return the memory of the noted weights: a forward may register others."""
        return {memory_key(w) for name, w in weights_of(self._model) if name in self._weights}

    def _measure(self) -> Sizes:
        """Return what shows at little cost that a forward has set an attribute."""
        return Sizes(self._model, self._judged)


class Watch:
    """Watches the first prefill and the first decode of a runner, on the scheduler's thread."""

    def __init__(self, caches: ForwardCaches, runner: ModelRunner) -> None:
        self._caches = caches
        self._runner = runner
        self._forward: Callable[..., Any] = runner.forward
        self._forwards = 0
        # whether a forward decodes, of the kinds to come
        self._left = {True, False}
        vars(runner)["forward"] = self._run

    def _run(self, forward_batch: ForwardBatch, *args: Any, **kwargs: Any) -> Any:
        mode = forward_batch.forward_mode
        self._forwards += 1
        is_watched = not mode.is_idle() and mode.is_decode() in self._left
        if is_watched:
            self._left.remove(mode.is_decode())
        if not self._left or self._forwards >= MOST_FORWARDS:
            self._end()
        watched = self._begin(forward_batch, *args, *kwargs.values()) if is_watched else None
        if watched is None:
            return self._forward(forward_batch, *args, **kwargs)
        with watched.origins:
            output = self._forward(forward_batch, *args, **kwargs)
        try:
            if watched.origins.failure is not None:
                raise watched.origins.failure
            self._caches.find(watched)
        except Exception as error:
            self._fail(error)
        return output

    def _begin(self, *arguments: object) -> Watched | None:
        try:
            weights, constants = self._caches.known_tensors()
            origins = Provenance(weights, constants, request=_tensors_of_request(arguments))
            return Watched(origins, self._caches.attributes())
        except Exception as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        """Watch no more. Later searches take each new floating tensor for one of weights."""
        self._end()
        logger.warning("The first forwards are not watched, because of %r.", error)

    def _end(self) -> None:
        vars(self._runner).pop("forward", None)


_OUTDATED = ", which a commit would leave as it was: restart the server for other weights"


def _tensors_of_request(arguments: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors in a forward's arguments, their attributes, and these ones' attributes."""
    for argument in arguments:
        yield from tensors_in(argument)
        for value in attributes_of_object(argument):
            yield from tensors_in(value)
            for each in attributes_of_object(value):
                yield from tensors_in(each)


def _join(slot: _Slot) -> str:
    return f"{slot.path}.{slot.name}".strip(".")


def _noted(value: Any, weight_keys: set[int]) -> _Value:
    tensors = tuple(t for t in tensors_within(value) if memory_key(t) not in weight_keys)
    if is_plain(value):
        return _Value(tensors, value, is_plain=True)
    if is_empty(value):
        return _Value(tensors, type(value)(), is_plain=True)
    return _Value(tensors, None, is_plain=False)


def _is_new_number(slot: _Slot, now: _Value, watched: Watched) -> bool:
    """Return whether a forward that read numbers from weights has set this number."""
    is_new = isinstance(now.plain, float) and watched.before.get(slot).plain != now.plain
    return is_new and watched.origins.reads_numbers


def _is_of_weights(
    tensor: torch.Tensor, slot: _Slot, origins: Provenance | None, was_set: bool
) -> bool:
    """Return whether a new ``tensor`` counts as made of weights."""
    origin = Origin.UNKNOWN if origins is None else origins.origin_of(tensor)
    if origin is Origin.UNKNOWN and was_set and not slot.has_weights:
        # a module without weights replaces its tables by longer ones, or in another precision
        return False
    return _counts(origin, (tensor,))


def _counts(origin: Origin, tensors: Iterable[torch.Tensor]) -> bool:
    if origin.is_of_weights:
        return True
    is_unknown = Origin.UNKNOWN in origin and Origin.REQUEST not in origin
    return is_unknown and any(tensor.is_floating_point() for tensor in tensors)
