"""Proves a plan where no checkpoint is served: its model's loader gets other content.

SGLang may have started with random weights (``--load-format dummy``), and updates may have written
something that is on no disk. Where a loader puts tensors does not depend on that. So it gets random
bits for each tensor of the plan, into a copy of the model (``twin.py``), and what it makes of
them is compared with what the moves give.

An update by this plan is what the same update by the loader is. That is all that the plan of a
model needs which SGLang serves as it was loaded. For a model that SGLang finishes, its recipe shows
which weights are served so.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.plans.record import Kind
from sglang_inflight.scheduler.plans.twin import Expected, Twin
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.vocabulary.errors import describe

logger = logging.getLogger(__name__)

# bytes of tensors after which the copy's memory is given back
_MOST_BYTES = 64 << 20
# a tensor, what it is compared with, and the copy's own
_COPIES = 3
# failures after which the loader gets no more
_MOST_FAILURES = 12
_SEED = 1


def prove_by_loader(
    plan: Plan,
    model: nn.Module,
    check: Callable[[], None],
    rate_limit: RateLimit,
    host_bytes: int,
) -> bool:
    """Drop each weight into which the loader of ``model`` puts something else than the moves.

    ``model`` is the one that the plan was recorded from. It is only read. Tensors that the loader
    takes together are on the host at once, in at most ``host_bytes``: others are dropped, and so
    are those at which the loader fails. ``check`` raises to give up.

    Return whether each weight was compared.
    """
    with torch.no_grad():
        return _Trial(plan, model, check, rate_limit, host_bytes).run()


class _Trial:
    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        check: Callable[[], None],
        rate_limit: RateLimit,
        host_bytes: int,
    ) -> None:
        self._plan = plan
        self._twin = Twin(plan, model, rate_limit)
        self._check = check
        self._rate_limit = rate_limit
        self._random = torch.Generator().manual_seed(_SEED)
        self._is_whole = True
        # sets of tensors that the loader takes together; it writes the last set when it returns
        self._waiting: deque[tuple[str, ...]] = deque()
        self._late: tuple[str, ...] = ()
        self._find_units(host_bytes)
        # the set that the loader has got last, and what it shall make of it
        self._unit: tuple[str, ...] = ()
        self._expected: list[Expected] = []

    def _find_units(self, host_bytes: int) -> None:
        together = self._plan.together
        sets: dict[str | None, list[str]] = {}
        for name in self._plan.kinds:
            sets.setdefault(together.get(name, name), []).append(name)
        needed, late = self._plan.needed, sets.pop(None, [])
        if late:
            # it may look for any tensor then
            late += [name for names in sets.values() if needed.isdisjoint(names) for name in names]
        for names in (*sets.values(), late):
            if needed.isdisjoint(names):
                continue
            if _COPIES * self._nbytes(names) > host_bytes:
                self._leave_out(names, "to compare it with the loader takes too much host memory")
                continue
            self._waiting.append(tuple(names))
            if names is late:
                self._late = tuple(names)

    def run(self) -> bool:
        failures = 0
        while self._waiting:
            why = ""
            try:
                self._twin.load(self._tensors())
                self._compare()
            except Exception as error:
                # the loader may have raised another one for it
                self._check()
                why = f": {describe(error)}"
                logger.debug("The loader's trial ended at %s", self._unit, exc_info=True)
            self._check()
            if not (self._unit or self._waiting):
                break
            failures += 1
            if failures == _MOST_FAILURES:
                self._unit += tuple(name for unit in self._waiting for name in unit)
                self._waiting.clear()
            self._leave_out(self._unit, f"the loader does not take it without others{why}")
            self._unit = ()
        self._twin.release()
        return self._is_whole

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        nbytes = 0
        while self._waiting:
            self._unit, self._expected = self._waiting.popleft(), []
            for name in self._unit:
                self._check()
                tensor = self._content(self._plan.kinds[name], is_planned=name in self._plan.moves)
                if name in self._plan.moves:
                    self._expected += self._twin.expect(name, tensor)
                yield name, tensor
                nbytes += tensor.nbytes
            if self._unit == self._late:
                return
            # the loader asks for the next one: it has put these
            self._compare()
            if nbytes > _MOST_BYTES:
                nbytes = 0
                self._twin.release()

    def _compare(self) -> None:
        for different in self._twin.differing(self._expected):
            logger.debug("The loader does not put %r as planned", different.name)
            self._plan.drop(different.place, "the loader puts something else than its moves there")
        self._unit, self._expected = (), []

    def _content(self, kind: Kind, *, is_planned: bool) -> torch.Tensor:
        """Return random bits; ones for a tensor with which the loader computes."""
        if not is_planned:
            return torch.ones(kind.shape).to(kind.dtype)
        numel = math.prod(kind.shape)
        return random_row(numel, kind.dtype, self._random, self._rate_limit).view(kind.shape)

    def _leave_out(self, names: Sequence[str], why: str) -> None:
        self._is_whole = False
        for name in names:
            for each in self._plan.moves.get(name, ()):
                self._plan.drop(each.place, why)

    def _nbytes(self, names: Sequence[str]) -> int:
        kinds = (self._plan.kinds[name] for name in names)
        return sum(math.prod(kind.shape) * kind.dtype.itemsize for kind in kinds)


def random_row(
    numel: int, dtype: torch.dtype, random: torch.Generator, rate_limit: RateLimit
) -> torch.Tensor:
    """Return random bits as a row of ``dtype``: large and small numbers, no NaN and no infinity."""
    words = torch.empty(-(-numel * dtype.itemsize // 8), dtype=torch.int64)
    for (piece,) in rate_limit.cut(words):
        piece.random_(-(1 << 63), None, generator=random)
        row = piece.view(torch.uint8)
        if dtype is torch.bool:
            row.bitwise_and_(1)
        elif dtype.is_floating_point:
            # a loader or a finishing may refuse others; they have an exponent of ones here
            row.bitwise_xor_(((row & 0x7C) == 0x7C).to(torch.uint8) << 6)
    return words.view(torch.uint8)[: numel * dtype.itemsize].view(dtype)
