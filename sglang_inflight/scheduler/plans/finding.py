"""Finds the plan of one model: recalled, or recorded and proven."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

import torch
from torch import nn

from sglang_inflight.host_memory import available_to_this_rank
from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.plans.record import Kind, record, why_not_apart
from sglang_inflight.scheduler.plans.remembered import recall, remember
from sglang_inflight.scheduler.plans.trial import prove_by_loader
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.vocabulary.errors import shorten


def find_plan(
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    kinds: Mapping[str, Kind],
    name: str | None,
    serves_checkpoint: Callable[[], bool],
    read_served: Callable[[Container[str]], Iterable[tuple[str, torch.Tensor]]],
    check: Callable[[], None],
    rate_limit: RateLimit,
    *,
    restrict: Callable[[Plan], None] = lambda plan: None,
) -> Plan:
    """Return the plan of ``model``, in the layout of its checkpoint, which is only read.

    ``weights``: those that moves may write, as they are served, by name. ``restrict`` drops what
    else is left to the loader. ``kinds``: the served checkpoint's tensors.

    ``serves_checkpoint``: whether that is what is served, and not only of its kinds. Then
    ``read_served`` gets names, and yields these tensors of it, or more. Else the model's loader
    proves the plan (``trial.py``).

    ``name``: that of the plan in the cache, None to keep none. A plan is kept if another server
    would find the same one: what is served here, and the memory here, have left nothing out.
    ``check`` raises to give up. Raises what these raise.
    """
    plan = recall(name) if name is not None else None
    if plan is not None:
        plan.fit(weights)
        restrict(plan)
        return plan
    plan = Plan.of(record(model, kinds), kinds, weights)
    if serves_checkpoint():
        is_proven = plan.prove(read_served(plan.needed), weights, check, rate_limit)
    else:
        host_bytes = available_to_this_rank()
        is_proven = prove_by_loader(plan, model, check, rate_limit, host_bytes)
    # other weights may be served by now
    check()
    restrict(plan)
    if (why := why_not_apart(model, kinds, plan.by_loader)) is not None:
        plan = Plan(kinds, {}, dict.fromkeys(kinds, shorten(why)), {})
    if name is not None and is_proven:
        remember(name, plan)
    return plan
