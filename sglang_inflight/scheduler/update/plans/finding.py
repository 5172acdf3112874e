"""Finds the plan of one model: recalled, or recorded and proven with the served checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

import torch
from torch import nn

from sglang_inflight.scheduler.update.plans.plan import Plan
from sglang_inflight.scheduler.update.plans.record import Kind, record
from sglang_inflight.scheduler.update.plans.remembered import recall, remember
from sglang_inflight.scheduler.update.rate import RateLimit


def find_plan(
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    kinds: Mapping[str, Kind],
    name: str | None,
    require_checkpoint: Callable[[], None],
    read_served: Callable[[Container[str]], Iterable[tuple[str, torch.Tensor]]],
    check: Callable[[], None],
    rate_limit: RateLimit,
    *,
    restrict: Callable[[Plan], None] = lambda plan: None,
) -> Plan:
    """Return the plan of ``model``, in the layout of its checkpoint, which is only read.

    ``weights``: those that moves may write, as they are served, by name. ``restrict`` drops what
    else is left to the loader. ``kinds``: the served checkpoint's tensors.

    ``require_checkpoint`` raises if another is served, or none. ``read_served`` gets names, and
    yields these tensors of it, or more. ``name``: that of the plan in the cache, None to keep none.
    ``check`` raises to give up. Raises what these raise.
    """
    plan = recall(name) if name is not None else None
    if plan is not None:
        plan.fit(weights)
        restrict(plan)
        return plan
    require_checkpoint()
    plan = Plan.of(record(model, kinds), kinds, weights)
    plan.prove(read_served(plan.needed), weights, check, rate_limit)
    # other weights may be served by now
    check()
    restrict(plan)
    if name is not None:
        remember(name, plan)
    return plan
