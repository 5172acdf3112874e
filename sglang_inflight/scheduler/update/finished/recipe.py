"""How loading and finishing make what is served: found once, by the served checkpoint itself.

The served checkpoint is loaded into the raw model and finished by SGLang's own steps. The outcome
must be the served model, byte for byte. Then any other checkpoint of this model may take the same
way. The outcome differs if a step depends on something else: another order of steps, an update in
between, or a tensor that serving has made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import nn

from sglang_inflight.scheduler.update.finished.places import Number, Place, numbers_of, tensors_of
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import Unproven


@dataclass(frozen=True)
class Recipe:
    """The findings of a load of the served checkpoint.

    ``names``: the checkpoint's tensors that each raw weight is made of. ``kept``: raw weights that
    finishing leaves as they were loaded, and that are served. ``tensors``, ``numbers``: the places
    of all that was made. ``awaited``: modules that ``post_load_weights`` reads, or that
    finishing deletes.
    """

    names: dict[str, frozenset[str]]
    kept: frozenset[str]
    tensors: frozenset[Place]
    numbers: frozenset[Place]
    awaited: frozenset[str]


def compare(
    made: dict[Place, torch.Tensor],
    numbers: dict[Place, Number],
    model: nn.Module,
    live: nn.Module,
    loaded: Collection[int],
    reached: Collection[Place],
    rate_limit: RateLimit,
    check: Callable[[], None],
) -> None:
    """Raise ``Unproven`` with the first place where the finished ``model`` is not the ``live`` one.

    ``made``, ``numbers``: what loading and finishing made in ``model``. ``loaded``: memory of
    ``live`` that loading made, by ``memory_key``; forwards made the rest. ``reached``: the places
    in ``model`` that tensors of the checkpoint were loaded into. ``check`` raises to give up.
    """
    served = tensors_of(live)
    for place in sorted(reached):
        # a commit exchanges what is made, and a digest covers it
        if place in served and place not in made:
            raise Unproven(f"the checkpoint brings {str(place)!r}, and finishing does not make it")
    for place, tensor in made.items():
        check()
        if (expected := served.get(place)) is None:
            raise Unproven(f"finishing makes {str(place)!r}, and the served model has none")
        _require_equal(place, tensor, expected, rate_limit)
    live_numbers = numbers_of(live)
    for place, number in numbers.items():
        found = live_numbers[place][2] if place in live_numbers else None
        if found != number:
            raise Unproven(f"finishing sets {str(place)!r} to {number}, and {found} is served")
    known = {memory_key(served[place]) for place in made}
    has = tensors_of(model).keys()
    for place, tensor in served.items():
        key = memory_key(tensor)
        if place in has or not tensor.is_floating_point() or key in known or key not in loaded:
            continue
        raise Unproven(f"the served model has {str(place)!r}, and loading does not make it")


def _require_equal(
    place: Place, made: torch.Tensor, served: torch.Tensor, rate_limit: RateLimit
) -> None:
    if describe_layout(made) != describe_layout(served):
        raise Unproven(
            f"finishing makes {str(place)!r} as {describe_layout(made)}, and it is served as "
            f"{describe_layout(served)}"
        )
    for one, other in rate_limit.cut(made, served):
        same = one.contiguous().view(-1).view(torch.uint8)
        if not torch.equal(same, other.contiguous().view(-1).view(torch.uint8).to(same.device)):
            raise Unproven(f"finishing makes {str(place)!r} with other values than are served")


def describe_layout(tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} of shape {list(tensor.shape)} and strides {list(tensor.stride())}"
