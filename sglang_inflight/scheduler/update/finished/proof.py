"""Finds a model's recipe with the checkpoint that it serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_inflight.host_memory import pinned_bytes
from sglang_inflight.scheduler.plans.plan import are_equal
from sglang_inflight.scheduler.plans.trial import random_row
from sglang_inflight.scheduler.update.checks.dataflow import Dataflow
from sglang_inflight.scheduler.update.checks.dataflow import tensors_of as arguments_in
from sglang_inflight.scheduler.update.finished.places import (
    Number,
    Place,
    modules_of,
    numbers_of,
    owners_at,
    split_name,
    tensors_at,
    tensors_of,
)
from sglang_inflight.scheduler.update.finished.raw_model import Made, RawModel, RawWeight, State
from sglang_inflight.scheduler.update.finished.recipe import Recipe, describe_layout
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.shadow import checksum
from sglang_inflight.storages import memory_key, span_of
from sglang_inflight.vocabulary.errors import Dropped, Refused, Unproven, describe

logger = logging.getLogger(__name__)

_POSITIONS = (torch.bool, torch.int16, torch.int32, torch.int64)
_SEED = 1
_NOTHING: frozenset[Any] = frozenset()
_UNKNOWN = Recipe({}, _NOTHING, _NOTHING, _NOTHING, _NOTHING)


class NotNow(Unproven):
    """The proof could not be made, for a reason that may pass: no room, or nothing to read."""


def find_recipe(
    pristine: nn.Module,
    live: nn.Module,
    device: torch.device,
    weights: Iterable[tuple[str, torch.Tensor]],
    rate_limit: RateLimit,
    host_bytes: int,
    loaded: Collection[int],
    check: Callable[[], None] = lambda: None,
) -> Recipe:
    """Load ``weights``, which are served, beside the served model, finish it, and compare the two.

    ``pristine`` is the model before loading, ``live`` the served one. The load takes host memory
    for all weights of this rank and for finishing one module, at most ``host_bytes``. ``loaded``:
    memory of ``live`` that loading made, by ``memory_key``. ``check`` raises to give up.

    Raise ``Unproven`` with the first difference, or if the weights cannot be loaded here; its child
    ``NotNow`` if the reason may pass.
    """
    proof = Proof(pristine, live, device, rate_limit, check)
    if (needed := proof.needed_bytes) > host_bytes:
        raise NotNow(
            f"its first update loads the served checkpoint beside it, for which the host needs "
            f"{needed >> 20} MiB, and {host_bytes >> 20} MiB are free for this rank"
        )
    try:
        with torch.no_grad():
            proof.begin(None, is_partial=False)
            dataflow = Dataflow(
                proof.targets(), before_write=proof.note_write, rate_limit=rate_limit
            )
            with dataflow:
                received = dataflow.receive_each(weights)
                DefaultModelLoader.load_weights_only(proof.model, received, device)
            proof.finish()
        return proof.recipe(loaded)
    except (Dropped, Unproven):
        raise
    except Exception as error:
        why = str(error) if isinstance(error, Refused) else describe(error)
        kind = NotNow if _may_pass(error) else Unproven
        raise kind(
            f"the served checkpoint cannot be loaded and finished beside it: {why}"
        ) from error
    finally:
        # a cycle keeps the objects until the next collection
        proof.forget()
        if device.type != "cpu":
            # SGLang brings results back to pinned memory, which torch would keep
            torch.accelerator.empty_host_cache()


def _may_pass(error: BaseException | None) -> bool:
    """Return whether ``error`` comes of memory that is taken now, or of files out of reach."""
    while error is not None:
        if isinstance(error, OSError | MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
            return True
        error = error.__cause__
    return False


# texts of errors of torch's allocator on the host, and of CUDA's
_NO_MEMORY = ("can't allocate memory", "out of memory")


class Proof(RawModel):
    """Compares with the served model in place of staging. It knows no recipe."""

    def __init__(
        self,
        pristine: nn.Module,
        live: nn.Module,
        device: torch.device,
        rate_limit: RateLimit,
        check: Callable[[], None],
    ) -> None:
        super().__init__(pristine, live, device, rate_limit, _UNKNOWN)
        self._check = check
        self._served = tensors_of(live)
        self._served_numbers = {place: found[2] for place, found in numbers_of(live).items()}
        # places of all that was made, and is served
        self._tensors: set[Place] = set()
        self._numbers: set[Place] = set()
        self._random = torch.Generator().manual_seed(_SEED)
        self._present: set[Place] = set()
        # modules whose weights finishing has left with the content of their memory, and those of
        # which it has looked at a weight
        self._left_alone: set[str] = set()
        self._looked_at: set[str] = set()
        # layouts and contents of raw tensors before their finishing
        self._before: dict[Place, tuple[str, str]] = {}

    @property
    def needed_bytes(self) -> int:
        """Return the bytes on the host that the proof takes.

        Finishing a module may replace all of its weights. SGLang brings results of a device back to
        the host, into pinned memory, which torch keeps beside the module's other content.
        """
        is_host = self._device.type == "cpu"
        most = 0
        for weights in self._of_module.values():
            pinned = 0 if is_host else sum(pinned_bytes(weight.tensor) for weight in weights)
            most = max(most, pinned + sum(weight.tensor.nbytes for weight in weights))
        return most + sum(weight.tensor.nbytes for weight in self._raw_weights.values())

    def recipe(self, loaded: Collection[int]) -> Recipe:
        """Return the findings, at the end. Raise ``Unproven`` with a served tensor not made.

        ``loaded``: memory of the served model that loading made, by ``memory_key``; forwards made
        the rest.
        """
        names = {w.name: frozenset(w.names) for w in self._raw_weights.values() if w.names}
        loaded_into = {key for key, weight in self._raw_weights.items() if weight.names}
        # views of raw weights have places, too
        for place in sorted(at for at, key in self._raw_memory.items() if key in loaded_into):
            # a commit exchanges what is made, and a digest covers it
            if place in self._served and place not in self._tensors:
                raise Unproven(
                    f"the checkpoint brings {str(place)!r}, and finishing does not make it"
                )
        known = {memory_key(self._served[place]) for place in self._tensors}
        for place, tensor in self._served.items():
            is_made = memory_key(tensor) not in loaded or memory_key(tensor) in known
            if not (is_made or place in self._present) and tensor.is_floating_point():
                raise Unproven(f"the served model has {str(place)!r}, and loading does not make it")
        # finishing has deleted the others: they are no module's result, and wait for the rest
        there = {name for name in names if Place(*split_name(name)) in self._tensors}
        gone = {split_name(name)[0] for name in names.keys() - there}
        untouched = self._left_alone - self._looked_at
        return Recipe(
            names=names,
            untouched=frozenset(name for name in there if split_name(name)[0] in untouched),
            tensors=frozenset(self._tensors),
            numbers=frozenset(self._numbers),
            awaited=frozenset(gone | self._read_modules),
        )

    def take(self, made: Made) -> None:
        """Raise ``Unproven`` with the first place where what was made is not served."""
        for place, tensor in made.tensors.items():
            self._check()
            if (served := self._served.get(place)) is None:
                raise Unproven(f"finishing makes {str(place)!r}, and the served model has none")
            if describe_layout(tensor) != describe_layout(served):
                raise Unproven(
                    f"finishing makes {str(place)!r} as {describe_layout(tensor)}, and it is "
                    f"served as {describe_layout(served)}"
                )
            if not are_equal(tensor, served, self._rate_limit):
                raise Unproven(f"finishing makes {str(place)!r} with other values than are served")
        for place, number in made.numbers.items():
            found = self._served_numbers.get(place)
            if found != number:
                raise Unproven(f"finishing sets {str(place)!r} to {number}, and {found} is served")
        self._tensors |= made.tensors.keys()
        self._numbers |= made.numbers.keys()
        self._present |= made.present

    # ---- what finishing does to a module -------------------------------------------------

    def _require_whole(self, paths: list[str]) -> None:
        super()._require_whole(paths)
        for path in paths:
            for owner in owners_at(path, self._modules[path]):
                for place, tensor in tensors_at(owner):
                    self._before[place] = self._look_at(tensor)

    def _make(self, paths: list[str], *, at_seal: bool) -> None:
        # loading deletes modules of some models, and nothing is made of those
        present = {path for path, _ in modules_of(self.model)}
        # the results of one module alone take memory beside the raw weights
        for path in paths:
            if path in present:
                self._prove(path)

    def _prove(self, path: str) -> None:
        module = self._modules[path]
        # finished as a copy: another one gets other content
        loaded = State(path, module)
        loaded.restore(module)
        self._process(path)
        made = self._made_by(owners_at(path, module), finished={path})
        weights = [weight for weight in self._of_module.get(path, ()) if weight.names]
        is_alone = len(weights) > 0 and all(map(self._is_left_alone, weights))
        self.take(made)
        layouts = {place: describe_layout(tensor) for place, tensor in made.tensors.items()}
        made.tensors.clear()
        # others may share its raw weights, and nothing is known of that yet: none is reset
        self._restore([path])
        if is_alone and getattr(module, "quant_method", None) is None:
            self._left_alone.add(path)
        elif is_alone and path not in self._looked_at:
            loaded.restore(module)
            for weight in weights:
                tensor = getattr(module, weight.attribute)
                tensor.data = self._altered(tensor.data)
                self._before[weight.place] = self._look_at(tensor)
            if self._finishes_alike(path, weights, layouts, made.numbers):
                self._left_alone.add(path)
            self._raw[path].restore(module)

    def _finishes_alike(
        self,
        path: str,
        weights: Iterable[RawWeight],
        layouts: Mapping[Place, str],
        numbers: Mapping[Place, Number],
    ) -> bool:
        """Return whether finishing does with other content what it has done with that served.

        Kernels outside of torch's dispatcher are not seen when they look at it. ``layouts`` and
        ``numbers``: what was made of the served content.
        """
        try:
            self._process(path)
            again = self._made_by(owners_at(path, self._modules[path]), finished={path})
        except Exception:
            logger.debug("%s is not finished with other content", path, exc_info=True)
            return False
        made = {place: describe_layout(tensor) for place, tensor in again.tensors.items()}
        is_same = (made, again.numbers) == (layouts, numbers)
        return is_same and all(map(self._is_left_alone, weights))

    def _altered(self, data: torch.Tensor) -> torch.Tensor:
        """Return a tensor like ``data`` with random bits. Positions stay: a kernel may use them."""
        with Dataflow.untraced():
            if data.dtype in _POSITIONS or span_of(data) != data.numel():
                return data.clone()
            row = random_row(data.numel(), data.dtype, self._random, self._rate_limit)
            return row.as_strided(data.shape, data.stride()).to(data.device)

    def _process_on_device(self, path: str, module: Any) -> None:
        """Note of which modules finishing ``path`` takes more than the memory."""
        named = (*module.named_parameters(prefix=path), *module.named_buffers(prefix=path))
        there = {memory_key(tensor): split_name(name)[0] for name, tensor in named}
        with _Looks() as looks:
            super()._process_on_device(path, module)
        for memory in looks.memory:
            if memory in there:
                self._looked_at.add(there[memory])
            elif (weight := self._raw_weights.get(memory)) is not None:
                self._looked_at.add(weight.module)

    def _is_made(self, place: Place, tensor: torch.Tensor) -> bool:
        return super()._is_made(place, tensor) or self._has_other_bytes(place, tensor)

    def _is_left_alone(self, weight: RawWeight) -> bool:
        """Return whether the memory at the place of ``weight`` has the content that was loaded.

        It may be other memory, or seen in another shape.
        """
        tensor = getattr(self._modules[weight.module], weight.attribute, None)
        if not isinstance(tensor, torch.Tensor):
            return False
        return self._look_at(tensor)[1] == self._before[weight.place][1]

    def _has_other_bytes(self, place: Place, tensor: torch.Tensor) -> bool:
        before = self._before.get(place)
        return before is not None and self._look_at(tensor) != before

    def _look_at(self, tensor: torch.Tensor) -> tuple[str, str]:
        """Return the layout of ``tensor``, and a checksum of its memory."""
        self._rate_limit.spend(tensor.nbytes)
        with Dataflow.untraced():
            is_dense = span_of(tensor) == tensor.numel()
            memory = tensor.as_strided((tensor.numel(),), (1,)) if is_dense else tensor
            return describe_layout(tensor), checksum([memory])


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
