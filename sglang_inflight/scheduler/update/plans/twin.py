"""Compares a plan with its model's loader, on a copy of the model in the host's memory.

Only what the loader writes takes room there. One thread at a time uses a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_inflight.scheduler.update.changes.encoding import as_integers
from sglang_inflight.scheduler.update.changes.handles import Handle
from sglang_inflight.scheduler.update.checks.dataflow import (
    COMMUNICATION,
    Dataflow,
    without_threads,
)
from sglang_inflight.scheduler.update.plans.plan import Plan, are_equal, cast
from sglang_inflight.scheduler.update.plans.record import leave_unfinished
from sglang_inflight.scheduler.update.rate import RateLimit, copy_in_pieces
from sglang_inflight.scheduler.update.shadow import Shadow

_HOST = torch.device("cpu")
_COPY = torch.ops.aten.copy_.default


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
        self._handles: list[Handle] = []
        shadow = Shadow(model, _HOST, self._handle_for)
        leave_unfinished(shadow.model)
        self._loader: Any = shadow.model
        self._weights = {name: weight for name, _, weight in shadow.pairs}

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
        """Let the model's loader put ``tensors`` into the copy. Raise what it raises."""
        with _Alone(self._rate_limit):
            self._loader.load_weights(_apart(tensors))

    def differing(self, expected: Iterable[Expected]) -> list[Expected]:
        """Return those of ``expected`` that the loader has made something else."""
        return [e for e in expected if not are_equal(e.to, e.of, self._rate_limit)]

    def release(self) -> None:
        """Give the memory back. What the copy holds is forgotten."""
        for handle in self._handles:
            handle.release()

    def _handle_for(self, weight: torch.Tensor) -> torch.Tensor:
        handle = Handle(weight)
        self._handles.append(handle)
        return handle.tensor


class _Alone(TorchDispatchMode):
    """Refuses communication: other ranks may be in a step. Copies are paced."""

    def __init__(self, rate_limit: RateLimit) -> None:
        super().__init__()
        self._rate_limit = rate_limit

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in COMMUNICATION:
            raise RuntimeError(f"it communicates between ranks ({func})")
        if func is _COPY:
            copy_in_pieces(self._rate_limit, *args, **(kwargs or {}))
            return args[0]
        return func(*args, **(kwargs or {}))


def _apart(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``tensors`` to a loader whose operations are watched; those that make them are not."""
    pairs = iter(tensors)
    while True:
        with Dataflow.untraced():
            if (pair := next(pairs, None)) is None:
                return
        yield without_threads(*pair)
