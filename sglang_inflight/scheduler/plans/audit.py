"""Audits a plan: some tensors of each update go by the model's loader, too, and are compared.

The loader gets them on a copy of the model in memory of the host, of which only what it writes
takes room. A few sets of tensors are audited in each update, others each time. A difference refuses
the update by the tensor's name, and the weights of that tensor go by the loader from then on.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence, Set

import torch
from torch import nn

from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.plans.twin import Twin
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.vocabulary.errors import Refused, describe, shorten

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")
# an update audits no more
_MOST_TENSORS = 8
_MOST_BYTES = 64 << 20


class Differs(Refused):
    """The loader puts a tensor elsewhere than the plan. ``places``: the weights of that tensor."""

    def __init__(self, reason: str, places: Sequence[str]) -> None:
        super().__init__(reason)
        self.places = places


class Audit:
    """The audit of one model's plan. The staging thread owns it, from an update's begin to its end.

    A loader that holds a tensor for others gets them together (``Plan.units``).
    """

    def __init__(self, plan: Plan, model: nn.Module, rate_limit: RateLimit) -> None:
        """``model`` is the one that the plan was recorded from. It is only read."""
        self._plan = plan
        self._model = model
        self._rate_limit = rate_limit
        self._units = [unit for unit in plan.units() if self._nbytes(unit) <= _MOST_BYTES]
        # others after a restart
        random.Random().shuffle(self._units)
        self._next = 0
        self._twin: Twin | None = None
        # the unit of each tensor to audit, and those of its tensors that came
        self._wanted: dict[str, tuple[str, ...]] = {}
        self._came: dict[str, torch.Tensor] = {}
        # why nothing can be audited
        self.why_not: str | None = None
        self._audited = 0

    def begin(self) -> None:
        """Begin an update: choose what to audit in it."""
        self.forget()
        if self.why_not is not None:
            return
        nbytes = 0
        for _ in range(min(len(self._units), _MOST_TENSORS)):
            unit = self._units[self._next % len(self._units)]
            nbytes += self._nbytes(unit)
            is_full = nbytes > _MOST_BYTES or len(self._wanted) + len(unit) > _MOST_TENSORS
            if self._wanted and is_full:
                break
            self._next += 1
            self._wanted |= dict.fromkeys(unit, unit)

    def forget(self) -> None:
        """Give back the tensors that an update brought."""
        self._wanted.clear()
        self._came.clear()

    def wants(self, name: str) -> bool:
        return name in self._wanted

    def wanted_of(self, names: Set[str]) -> Set[str]:
        return self._wanted.keys() & names

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of a planned tensor until ``run``."""
        self._came[name] = tensor.to(_HOST, copy=True)

    def take_count(self) -> int:
        """Return how many tensors were audited since the last call of this method."""
        count, self._audited = self._audited, 0
        return count

    def run(self) -> None:
        """Audit what came whole. Raise ``Differs`` if the loader puts a tensor elsewhere.

        No loader of this thread may be running.
        """
        self._rate_limit.spend(0)
        for unit in {unit: None for name in self._came if (unit := self._wanted.get(name))}:
            if self.why_not is None and self._came.keys() >= set(unit):
                self._compare({name: self._came.pop(name) for name in unit})
                # the loader looks at all of the model's parameters for a few tensors
                self._rate_limit.spend_python()

    def _compare(self, tensors: dict[str, torch.Tensor]) -> None:
        if self._twin is None:
            self._twin = Twin(self._plan, self._model, self._rate_limit)
        twin = self._twin
        expected = [e for name, tensor in tensors.items() for e in twin.expect(name, tensor)]
        try:
            self._load(twin, tensors)
            different = [] if self.why_not is not None else twin.differing(expected)
        finally:
            twin.release()
        if self.why_not is not None:
            return
        if different:
            name, place, _, _ = different[0]
            raise Differs(
                f"the model's loader does not put {shorten(name)!r} into {place!r} as its plan "
                "says, for a reason that is not known. The next updates of that weight go by the "
                "loader: send this one again",
                [each.place for each in different],
            )
        self._audited += len(tensors)

    def _load(self, twin: Twin, tensors: dict[str, torch.Tensor]) -> None:
        try:
            twin.load(tensors.items())
        except Exception as error:
            self.why_not = f"the loader fails without other tensors: {describe(error)}"
            logger.warning("Updates by a plan are not audited: %s", self.why_not, exc_info=True)

    def _nbytes(self, unit: tuple[str, ...]) -> int:
        kinds = (self._plan.kinds[name] for name in unit)
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kinds)
