"""Weights of a finished model that a load plan may write: those that finishing has no part in.

Finishing leaves many modules alone: norms, embeddings, FP8 on most cards. Their weights are served
as they were loaded, at the same place, some of them transposed by strides alone. A plan counts the
elements of a weight's memory. So an update may move their tensors to where they are staged, past
the model's loader and past finishing. A module goes one way as a whole, because finishing takes no
part of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.update.finished.finished_model import live_numbers
from sglang_inflight.scheduler.update.finished.places import split_name, tensors_of, without_views
from sglang_inflight.scheduler.update.finished.recipe import Recipe


def plannable(live: nn.Module, recipe: Recipe) -> dict[str, torch.Tensor]:
    """Return the served weights, by name, that a plan may write.

    The memory of each is as loaded, and so is that of all weights of its module. No finishing has
    looked at their content, and makes no tensor there: so other content cannot change what it does.
    None shares memory with a tensor at another place.
    """
    served = {place: t for place, t in tensors_of(live).items() if place in recipe.tensors}
    within = without_views(served)
    shared = {at.module for views in within.items() if views[0] != views[1] for at in views}
    others = shared | recipe.awaited
    others |= {place.module for place in recipe.tensors if str(place) not in recipe.untouched}
    return {str(place): t for place, t in served.items() if place.module not in others}


def leave_torn(
    plan: Plan, recipe: Recipe, live: nn.Module, weights: Mapping[str, torch.Tensor]
) -> None:
    """Leave to the loader each module of which ``plan`` writes only a part of the ``weights``.

    So is a module with a number that finishing makes, or loading out of content. The load of the
    served checkpoint has shown which tensors a weight is made of (``recipe``). A plan that says
    something else is wrong: loading from disk may rename tensors.
    """
    numbers = live_numbers(live, recipe)
    made = {at.module: at for at, served in numbers.items() if plan.numbers.get(str(at)) != served}
    for place in [*plan.writers]:
        if (at := made.get(split_name(place)[0])) is not None:
            plan.drop(place, f"loading and finishing make {str(at)!r}")
    made_of: dict[str, set[str]] = {}
    for place, names in recipe.names.items():
        for name in names:
            made_of.setdefault(name, set()).add(place)
    for name, planned in [*plan.moves.items()]:
        if {each.place for each in planned} == made_of.get(name, set()):
            continue
        why = "loading puts the tensor into other weights than its plan"
        for each in planned:
            plan.drop(each.place, why)
        if plan.moves.pop(name, None) is not None:
            plan.by_loader[name] = why
    for place in [*plan.writers]:
        if not recipe.names.get(place, frozenset()) <= plan.moves.keys():
            plan.drop(place, "loading makes the weight of other tensors than its plan")
    modules = _by_module(weights)
    while torn := [m for m in _by_module(plan.writers).items() if m[1] != modules.get(m[0])]:
        for module, places in torn:
            for place in places:
                plan.drop(place, f"{module!r} is finished as a whole")


def _by_module(names: Iterable[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in names:
        found.setdefault(split_name(name)[0], set()).add(name)
    return found
