"""Compares a plan with its model's loader, on a copy of the model in the host's memory.

Only what the loader writes takes room there. One thread at a time uses a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from sglang_inflight.scheduler.plans.plan import Plan, are_equal, cast
from sglang_inflight.scheduler.plans.record import leave_unfinished
from sglang_inflight.scheduler.update.changes.encoding import as_integers
from sglang_inflight.scheduler.update.changes.handles import Handle
from sglang_inflight.scheduler.update.checks.dataflow import Dataflow
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.shadow import Shadow

_HOST = torch.device("cpu")


class Expected(NamedTuple):
    """One move of the tensor ``name``: ``to``, a part of the weight ``place``, shall be ``of``."""

    name: str
    place: str
    to: torch.Tensor
    of: torch.Tensor


class Twin:
    """A copy of the model that a plan was recorded from. The model is only read."""

    def __init__(self, plan: Plan, model: nn.Module, rate_limit: RateLimit) -> None:
        self._plan = plan
        self._rate_limit = rate_limit
        self._shadow = Shadow(model, _HOST, Handle)
        leave_unfinished(self._shadow.model)
        self._weights = {name: weight for name, _, weight in self._shadow.pairs}

    def expect(self, name: str, tensor: torch.Tensor) -> list[Expected]:
        """Return what the loader shall make of ``tensor``. Until it does, each element is wrong."""
        flat = tensor.reshape(-1)
        expected = []
        for each in self._plan.moves[name]:
            to = each.move.target.view(self._weights[each.place].data)
            of = each.move.source.view(cast(flat, each.through)).to(to.dtype)
            for part, right in self._rate_limit.cut(to, of):
                # nothing that the loader leaves alone is right by chance
                as_integers(part).copy_(as_integers(right).bitwise_not())
            expected.append(Expected(name, each.place, to, of))
        return expected

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Let the model's loader put ``tensors`` into the copy. Raise what it raises.

        Other ranks may be in a step: communication is refused.
        """
        loader: Any = self._shadow.model
        with Dataflow({}, before_write=lambda write: None, rate_limit=self._rate_limit) as dataflow:
            loader.load_weights(dataflow.receive_each(tensors))

    def differing(self, expected: Iterable[Expected]) -> list[Expected]:
        """Return those of ``expected`` that the loader has made something else."""
        return [e for e in expected if not are_equal(e.to, e.of, self._rate_limit)]

    def release(self) -> None:
        """Give the memory back. What the copy holds is forgotten."""
        for handle in self._shadow.handles.values():
            handle.release()
