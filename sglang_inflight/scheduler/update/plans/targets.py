"""Where the elements of a row go: boxes of weights, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from sglang_inflight.scheduler.update.plans.moves import Box
from sglang_inflight.scheduler.update.weight import Weight


class Targets:
    """Boxes whose elements lie side by side in a row, in this order.

    The weights have one dtype and device, and no element is in two boxes. Holds geometry alone:
    views of weights would keep memory that a commit has exchanged, and are Python's to collect.
    """

    def __init__(self, boxes: Iterable[tuple[Weight, Box]]) -> None:
        # each weight once, and the number of each box's weight
        self.weights: list[Weight] = []
        self.at: list[int] = []
        self.boxes: list[Box] = []
        self.sizes: list[int] = []
        # whether all boxes are ranges
        self.are_ranges = True
        number: dict[int, int] = {}
        for weight, box in boxes:
            at = number.setdefault(id(weight.live), len(self.weights))
            if at == len(self.weights):
                self.weights.append(weight)
            self.at.append(at)
            if box.is_range:
                self.boxes.append(Box(box.offset, (box.numel,), (1,)))
            else:
                self.boxes.append(box)
                self.are_ranges = False
            self.sizes.append(box.numel)
        self.ends = [*accumulate(self.sizes)]
        self._runs: list[list[int]] | None = None

    @property
    def numel(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def first(self) -> torch.Tensor:
        """A tensor of the weights' dtype and device."""
        return self.weights[0].live

    def views(self, memories: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each box in ``memories``, one for each weight, in the weight's layout."""
        starts = [int(memory.storage_offset()) for memory in memories]
        return [
            memories[at].as_strided(box.sizes, box.strides, starts[at] + box.offset)
            for at, box in zip(self.at, self.boxes, strict=True)
        ]

    def rows(self) -> list[torch.Tensor]:
        """Return the served elements of each box, as a row."""
        views = self.views([weight.live.data for weight in self.weights])
        return views if self.are_ranges else [view.reshape(-1) for view in views]

    def cut(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return the elements of each box in ``row``, in the box's shape."""
        pieces = [*row.split(self.sizes)]
        if self.are_ranges:
            return pieces
        return [p.view(box.sizes) for p, box in zip(pieces, self.boxes, strict=True)]

    def copy(self, memories: Sequence[torch.Tensor], row: torch.Tensor) -> None:
        """Copy ``row`` to each box in ``memories``, one for each weight, in the weight's layout."""
        torch._foreach_copy_(self.views(memories), self.cut(row))

    @property
    def runs(self) -> list[list[int]]:
        """The ranges among the boxes, by their numbers: neighbours in a weight are in one list."""
        if self._runs is None:
            self._runs = []
            last = (-1, 0)
            ranges = (
                (self.at[n], box.offset, n) for n, box in enumerate(self.boxes) if box.is_range
            )
            for weight, start, n in sorted(ranges):
                if last != (weight, start):
                    self._runs.append([])
                self._runs[-1].append(n)
                last = weight, start + self.sizes[n]
        return self._runs
