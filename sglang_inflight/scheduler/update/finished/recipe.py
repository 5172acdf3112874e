"""How loading and finishing make what is served: found once, by the served checkpoint itself.

The served checkpoint is loaded into the raw model and finished by SGLang's own steps. The outcome
must be the served model, byte for byte. Then any other checkpoint of this model may take the same
way. The outcome differs if a step depends on something else: another order of steps, an update in
between, or a tensor that serving has made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass

import torch
from torch import nn

from sglang_inflight.scheduler.update.finished.places import (
    Number,
    Place,
    numbers_of,
    split_name,
    tensors_of,
)
from sglang_inflight.scheduler.update.plans.plan import are_equal
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import Unproven


@dataclass(frozen=True)
class Recipe:
    """The findings of a load of the served checkpoint.

    ``names``: the checkpoint's tensors that each raw weight is made of. ``untouched``: raw weights
    whose memory is served as it was loaded, though maybe in another shape, and whose content no
    finishing has looked at. ``tensors``, ``numbers``: the places of all that was made. ``awaited``:
    modules that ``post_load_weights`` reads, or that finishing deletes.
    """

    names: dict[str, frozenset[str]]
    untouched: frozenset[str]
    tensors: frozenset[Place]
    numbers: frozenset[Place]
    awaited: frozenset[str]

    @functools.cached_property
    def together(self) -> Mapping[str, Set[str]]:
        """Names of the tensors that make the same modules as a tensor does, by its name."""
        at: dict[str, list[str]] = {}
        of: dict[str, set[str]] = {}
        for weight, names in self.names.items():
            module, _ = split_name(weight)
            of.setdefault(module, set()).update(names)
            for name in names:
                at.setdefault(name, []).append(module)
        return {
            name: of[modules[0]].union(*(of[module] for module in modules[1:]))
            for name, modules in at.items()
        }

    @property
    def deleted(self) -> frozenset[str]:
        """Modules of which finishing deletes a weight."""
        at = {split_name(name) for name in self.names}
        return frozenset(module for module, name in at if Place(module, name) not in self.tensors)


class Comparison:
    """Compares what loading and finishing make with the served model, part by part."""

    def __init__(self, live: nn.Module, rate_limit: RateLimit, check: Callable[[], None]) -> None:
        """``check`` raises to give up."""
        self._rate_limit = rate_limit
        self._check = check
        self._live_tensors = tensors_of(live)
        self._live_numbers = {place: found[2] for place, found in numbers_of(live).items()}
        self.tensors: set[Place] = set()
        self.numbers: set[Place] = set()

    def compare(self, made: Mapping[Place, torch.Tensor], numbers: Mapping[Place, Number]) -> None:
        """Raise ``Unproven`` with the first place where ``made`` or ``numbers`` are not served."""
        for place, tensor in made.items():
            self._check()
            if (expected := self._live_tensors.get(place)) is None:
                raise Unproven(f"finishing makes {str(place)!r}, and the served model has none")
            _require_equal(place, tensor, expected, self._rate_limit)
        for place, number in numbers.items():
            found = self._live_numbers.get(place)
            if found != number:
                raise Unproven(f"finishing sets {str(place)!r} to {number}, and {found} is served")
        self.tensors |= made.keys()
        self.numbers |= numbers.keys()

    def end(
        self, present: Collection[Place], reached: Collection[Place], loaded: Collection[int]
    ) -> None:
        """Raise ``Unproven`` with the first served tensor that no part has made.

        ``present``: the places of all tensors of the finished model. ``reached``: the places of raw
        weights that tensors of the checkpoint were loaded into. ``loaded``: memory of the served
        model that loading made, by ``memory_key``; forwards made the rest.
        """
        for place in sorted(reached):
            # a commit exchanges what is made, and a digest covers it
            if place in self._live_tensors and place not in self.tensors:
                raise Unproven(
                    f"the checkpoint brings {str(place)!r}, and finishing does not make it"
                )
        known = {memory_key(self._live_tensors[place]) for place in self.tensors}
        for place, tensor in self._live_tensors.items():
            key = memory_key(tensor)
            if place in present or not tensor.is_floating_point():
                continue
            if key in loaded and key not in known:
                raise Unproven(f"the served model has {str(place)!r}, and loading does not make it")


def _require_equal(
    place: Place, made: torch.Tensor, served: torch.Tensor, rate_limit: RateLimit
) -> None:
    if describe_layout(made) != describe_layout(served):
        raise Unproven(
            f"finishing makes {str(place)!r} as {describe_layout(made)}, and it is served as "
            f"{describe_layout(served)}"
        )
    if not are_equal(made, served, rate_limit):
        raise Unproven(f"finishing makes {str(place)!r} with other values than are served")


def describe_layout(tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} of shape {list(tensor.shape)} and strides {list(tensor.stride())}"
