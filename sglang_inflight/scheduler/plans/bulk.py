"""The moves of a whole stretch of tensors, worked out once.

A stretch is a layout that comes again in later updates. So its moves are found once, and neighbours
that go side by side are one move. Later the row is moved with some calls of torch, and of a tensor
Python knows nothing but its name in a set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from sglang_inflight.scheduler.plans.moves import Box
from sglang_inflight.scheduler.plans.plan import Plan, cast
from sglang_inflight.scheduler.plans.recorder import Planned
from sglang_inflight.scheduler.plans.targets import Boxes, Targets, joined
from sglang_inflight.scheduler.update.changes.encoding import PIECE
from sglang_inflight.scheduler.update.checks.tensors import FLOATS, may_be_tied
from sglang_inflight.scheduler.update.forms import Form
from sglang_inflight.scheduler.update.sources.batches import Packed
from sglang_inflight.scheduler.update.sources.stretch import Stretch
from sglang_inflight.scheduler.update.weight import Weight

# dtype of the row, casts, and dtype and device of the weights
_Kind = tuple[torch.dtype, tuple[torch.dtype, ...], torch.dtype, torch.device]


class _Group:
    """Moves of one kind: boxes of the row, and where their elements go."""

    def __init__(self, dtype: torch.dtype, through: tuple[torch.dtype, ...]) -> None:
        self.dtype = dtype
        self.of = Boxes()
        self.targets = Targets()
        self._through = through

    def add(self, of: Box, weight: Weight, to: Box) -> None:
        # neighbours in the row need not be neighbours in the weight
        self.of.add(of, joins=True)
        self.targets.add(weight, to)

    def row(self, row: torch.Tensor) -> torch.Tensor:
        """Return the elements to move. ``row``: the stretch's, in this dtype."""
        return cast(joined(self.of.rows(row)), self._through)


class Bulk:
    """How the tensors of one stretch go by the plan of one model."""

    def __init__(self, stretch: Stretch, plan: Plan, weights: Mapping[str, Weight]) -> None:
        """``weights``: those of the plan, by name."""
        # numbers of the tensors that go one by one, or by no plan
        self.left: list[int] = []
        names: set[str] = set()
        # how many tensors are moved to each weight
        self.counts: Counter[str] = Counter()
        self.nbytes = 0
        self._groups: list[_Group] = []
        open_groups: dict[_Kind, _Group] = {}
        # ranges of floats in the row, in elements of their dtype
        self._floats: dict[torch.dtype, Boxes] = {}
        for at, name in enumerate(stretch.names):
            dtype, shape, start = stretch.dtypes[at], tuple(stretch.shapes[at]), stretch.starts[at]
            # a sender's name may not be a text
            moves = plan.moves.get(name) if isinstance(name, str) else None
            size = torch.Size(shape).numel()
            if (
                moves is None
                or any(each.move.numel > PIECE for each in moves)
                or not plan.is_as_planned(name, shape, dtype)
                or start % dtype.itemsize
                or size > PIECE
                or may_be_tied(name)
                or name in names
            ):
                self.left.append(at)
                continue
            names.add(name)
            self.nbytes += size * dtype.itemsize
            if size and dtype in FLOATS:
                box = Box(start // dtype.itemsize, (size,), (1,))
                self._floats.setdefault(dtype, Boxes()).add(box, joins=True)
            self.counts.update({each.place for each in moves} if size else ())
            for each in moves if size else ():
                self._add(open_groups, dtype, start // dtype.itemsize, each, weights[each.place])
        self.names = frozenset(names)
        self.places = self.counts.keys()

    def _add(
        self,
        open_groups: dict[_Kind, _Group],
        dtype: torch.dtype,
        start: int,
        planned: Planned,
        weight: Weight,
    ) -> None:
        move = planned.move
        kind = dtype, planned.through, weight.live.dtype, weight.live.device
        group = open_groups.get(kind)
        if group is None or group.of.numel + move.numel > PIECE:
            group = open_groups[kind] = _Group(dtype, planned.through)
            self._groups.append(group)
        of = move.source
        group.add(of._replace(offset=of.offset + start), weight, move.target)

    def floats(self, row: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the floats of the planned tensors in ``row``, a row of each dtype."""
        packed = Packed(row)
        for dtype, boxes in self._floats.items():
            yield joined(boxes.rows(packed.row(dtype)))

    def move(self, row: torch.Tensor, form: Form) -> None:
        """Move what ``row`` has of the planned tensors."""
        packed = Packed(row)
        for group in self._groups:
            form.move_row(group.targets, group.row(packed.row(group.dtype)))
