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
from sglang_inflight.scheduler.update.rate import paced


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
        """Names of the tensors that make the same modules as a tensor does, by its name.

        Tensors of the same modules share one set: a module of experts may have a thousand.
        """
        of: dict[str, set[str]] = {}
        for weight, names in self.names.items():
            of.setdefault(split_name(weight)[0], set()).update(names)
        at: dict[str, tuple[str, ...]] = {}
        for module, together in paced(of.items()):
            for name in together:
                at[name] = (*at.get(name, ()), module)
        sets = {
            modules: set[str]().union(*(of[module] for module in modules))
            for modules in {*at.values()}
        }
        return {name: sets[modules] for name, modules in paced(at.items())}

    @property
    def deleted(self) -> frozenset[str]:
        """Modules of which finishing deletes a weight."""
        at = {split_name(name) for name in self.names}
        return frozenset(module for module, name in at if Place(module, name) not in self.tensors)


def describe_layout(tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} of shape {list(tensor.shape)} and strides {list(tensor.stride())}"
