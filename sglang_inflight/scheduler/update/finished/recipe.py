"""How loading and finishing make what is served: found once, by the served checkpoint itself.

The served checkpoint is loaded into the raw model and finished by SGLang's own steps. The outcome
must be the served model, byte for byte. Then any other checkpoint of this model may take the same
way. The outcome differs if a step depends on something else: another order of steps, an update in
between, or a tensor that serving has made.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch

from sglang_inflight.scheduler.update.finished.places import Place, split_name


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


def describe_layout(tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} of shape {list(tensor.shape)} and strides {list(tensor.stride())}"
