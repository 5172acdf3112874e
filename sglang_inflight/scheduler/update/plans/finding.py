"""Finds the plan of one model: recalled, or recorded and proven with the served checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from sglang_inflight.scheduler.update.plans.plan import Plan
from sglang_inflight.scheduler.update.plans.record import Kind, record
from sglang_inflight.scheduler.update.plans.remembered import recall, remember
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.shadow import weights_of


def find_plan(
    model: nn.Module,
    kinds: Mapping[str, Kind],
    name: str | None,
    read_served: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    check: Callable[[], None],
    rate_limit: RateLimit,
) -> Plan:
    """Return the plan of ``model``, which is only read.

    ``kinds``: of the served checkpoint's tensors, which ``read_served`` yields. ``name``: that of
    the plan in the cache, None to keep none. ``check`` raises to give up. Raises what
    ``read_served`` raises.
    """
    weights = dict(weights_of(model))
    plan = recall(name) if name is not None else None
    if plan is not None:
        plan.fit(weights)
        return plan
    served = read_served()
    plan = Plan.of(record(model, kinds), kinds, weights)
    plan.prove(served, weights, check, rate_limit)
    if name is not None:
        remember(name, plan)
    return plan
