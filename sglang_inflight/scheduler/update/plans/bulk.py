"""The moves of a whole stretch of tensors, worked out once.

A stretch is a layout that comes again in later updates. So its moves are found once, and neighbours
that go side by side are one move. Later the row is moved with some calls of torch, and of a tensor
Python knows nothing but its name in a set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from sglang_inflight.scheduler.update.changes.encoding import PIECE
from sglang_inflight.scheduler.update.checks.tensors import FLOATS, may_be_tied
from sglang_inflight.scheduler.update.forms import Form
from sglang_inflight.scheduler.update.plans.moves import Box
from sglang_inflight.scheduler.update.plans.plan import Plan, cast
from sglang_inflight.scheduler.update.plans.recorder import Planned
from sglang_inflight.scheduler.update.plans.targets import Targets
from sglang_inflight.scheduler.update.sources.stretch import Stretch
from sglang_inflight.scheduler.update.weight import Weight

# dtype of the row, casts, and dtype and device of the weights
_Kind = tuple[torch.dtype, tuple[torch.dtype, ...], torch.dtype, torch.device]


class _Group:
    """Moves of one kind: boxes of the row, and boxes of weights with as many elements each."""

    def __init__(self, dtype: torch.dtype, through: tuple[torch.dtype, ...]) -> None:
        self.dtype = dtype
        self.through = through
        # in elements of the row
        self.of: list[Box] = []
        self.numel = 0
        self._to: list[tuple[Weight, Box]] = []
        self._targets: Targets | None = None

    def add(self, of: Box, weight: Weight, to: Box) -> None:
        self.numel += of.numel
        if of.is_range:
            of = _as_range(of)
            # a row is read in its order: its pieces and those of weights need not be the same
            if self.of and self.of[-1].is_range and self.of[-1].end == of.offset:
                last = self.of.pop()
                of = Box(last.offset, (last.numel + of.numel,), (1,))
        self.of.append(of)
        if to.is_range and self._to:
            before, last = self._to[-1]
            to = _as_range(to)
            if before.live is weight.live and last.is_range and last.end == to.offset:
                self._to.pop()
                to = Box(last.offset, (last.numel + to.numel,), (1,))
        self._to.append((weight, to))

    @property
    def targets(self) -> Targets:
        if self._targets is None:
            self._targets, self._to = Targets(self._to), []
        return self._targets

    def row(self, row: torch.Tensor) -> torch.Tensor:
        """Return the elements to move. ``row``: the stretch's, in this dtype."""
        pieces = [box.view(row) for box in self.of]
        if len(pieces) == 1:
            return cast(pieces[0].reshape(-1).contiguous(), self.through)
        return cast(torch.cat([piece.reshape(-1) for piece in pieces]), self.through)


def _as_range(box: Box) -> Box:
    return Box(box.offset, (box.numel,), (1,))


class Bulk:
    """How the tensors of one stretch go by the plan of one model."""

    def __init__(self, stretch: Stretch, plan: Plan, weights: Mapping[str, Weight]) -> None:
        """``weights``: those of the plan, by name."""
        # numbers of the tensors that go one by one, or by no plan
        self.left: list[int] = []
        names: set[str] = set()
        places: set[str] = set()
        self.nbytes = 0
        self._groups: list[_Group] = []
        open_groups: dict[_Kind, _Group] = {}
        # ranges of floats in the row, in elements of their dtype
        self._floats: dict[torch.dtype, list[Box]] = {}
        for at, name in enumerate(stretch.names):
            dtype, shape, start = stretch.dtypes[at], tuple(stretch.shapes[at]), stretch.starts[at]
            moves = plan.moves.get(name)
            size = torch.Size(shape).numel()
            if (
                moves is None
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
                self._add_floats(dtype, Box(start // dtype.itemsize, (size,), (1,)))
            for each in moves if size else ():
                places.add(each.place)
                self._add(open_groups, dtype, start // dtype.itemsize, each, weights[each.place])
        self.names = frozenset(names)
        self.places = frozenset(places)

    def _add_floats(self, dtype: torch.dtype, box: Box) -> None:
        found = self._floats.setdefault(dtype, [])
        if found and found[-1].end == box.offset:
            last = found.pop()
            box = Box(last.offset, (last.numel + box.numel,), (1,))
        found.append(box)

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
        if group is None or group.numel + move.numel > PIECE:
            group = open_groups[kind] = _Group(dtype, planned.through)
            self._groups.append(group)
        of = move.source
        group.add(of._replace(offset=of.offset + start), weight, move.target)

    def floats(self, row: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the floats of the planned tensors in ``row``, a row of each dtype."""
        views = _Views(row)
        for dtype, boxes in self._floats.items():
            yield _cat([box.view(views.of(dtype)) for box in boxes])

    def move(self, row: torch.Tensor, form: Form) -> None:
        """Move what ``row`` has of the planned tensors."""
        views = _Views(row)
        for group in self._groups:
            form.move_row(group.targets, group.row(views.of(group.dtype)))


def _cat(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat([*rows])


class _Views:
    """A row of bytes in other dtypes, as many elements as it has whole ones."""

    def __init__(self, row: torch.Tensor) -> None:
        self._row = row
        self._views: dict[torch.dtype, torch.Tensor] = {}

    def of(self, dtype: torch.dtype) -> torch.Tensor:
        if (view := self._views.get(dtype)) is None:
            whole = len(self._row) // dtype.itemsize * dtype.itemsize
            view = self._views[dtype] = self._row[:whole].view(dtype)
        return view
