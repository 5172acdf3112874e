"""Compares what moves bring with what is served, for many small tensors at once.

    compare    a row of new elements with the served ones at their places, side by side
    scatter    each difference's position in the row to its position in its weight

So the interpreter's work is a microsecond a tensor, whatever the number of weights.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch

from sglang_inflight.scheduler.plans.targets import Targets, joined
from sglang_inflight.scheduler.update.changes.encoding import (
    OFFSET_BYTES,
    PIECE,
    Part,
    bits_of,
    encode,
    positions_in,
)
from sglang_inflight.scheduler.update.weight import Weight


def compare(
    targets: Targets, rows: Sequence[torch.Tensor], device: torch.device
) -> Iterator[tuple[Weight, Part]]:
    """Yield the weights that ``rows`` would change, and how, compared on ``device``.

    Together they are the row of ``targets``. Needs memory for four times its elements, and for
    thirty bytes a change.
    """
    if not targets.boxes.numel:
        return
    new = _row(rows, targets.first, device)
    served = _row(targets.rows(), targets.first, device)
    bits = bits_of(new)
    at = positions_in((bits ^ bits_of(served)).bool())
    del served
    if not len(at):
        return
    bounds = targets.column("bounds", device, targets.bounds)
    counts = torch.searchsorted(at, bounds).diff()
    box = torch.repeat_interleave(counts, output_size=len(at))
    width = new.element_size()
    if len(at) * (width + OFFSET_BYTES) >= len(new) * width:
        # values of whole ranges cost less, but a range must be one in the weight
        yield from _whole(targets, bits, targets.bounds(), counts.tolist())
        if targets.boxes.are_ranges:
            return
        others = [not targets.boxes.is_range(n) for n in range(len(targets.boxes))]
        rest = torch.tensor(others, device=device)[box]
        at, box = at[rest], box[rest]
    if len(at):
        within = at - bounds[box]
        yield from _changed(targets, box, within, bits[at])


def _row(rows: Sequence[torch.Tensor], like: torch.Tensor, device: torch.device) -> torch.Tensor:
    if rows[0].dtype != like.dtype or rows[0].device != device:
        rows = [row.to(device, like.dtype) for row in rows]
    return joined(rows)


def _whole(
    targets: Targets, bits: torch.Tensor, bounds: Sequence[int], counts: Sequence[int]
) -> Iterator[tuple[Weight, Part]]:
    """Yield all values of the boxes that are one range of their weight.

    ``bounds``: of the boxes in the row. ``counts``: the differences in each box.

    Ranges side by side are one, unless none of their elements changes.
    """
    for run in targets.runs:
        if not (count := sum(counts[n] for n in run)):
            continue
        first = targets.boxes.offsets[run[0]]
        pieces = [bits[bounds[n] : bounds[n + 1]] for n in run]
        values = pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces)
        for at, some in enumerate(torch.split(values, PIECE)):
            # the first piece stands for all
            changed = 0 if at else count
            own = some if len(some) == len(values) else some.clone()
            part = Part(first + at * PIECE, len(own), own, changed=changed)
            yield targets.weights[targets.at[run[0]]], part


def _changed(
    targets: Targets, box: torch.Tensor, within: torch.Tensor, values: torch.Tensor
) -> Iterator[tuple[Weight, Part]]:
    """Yield the changes by pieces of weights. ``within``: positions in their boxes (``box``)."""
    weights = targets.weights
    pieces = [-(-weight.live.numel() // PIECE) for weight in weights]
    first = [0, *accumulate(pieces)]
    key = _positions(targets, box, within)
    key += targets.column(
        "weights' starts", key.device, lambda: [first[at] * PIECE for at in targets.at]
    )[box]
    if bool((key[1:] < key[:-1]).any()):
        key, order = key.sort()
        values = values[order]
    found, counts = torch.unique_consecutive(key // PIECE, return_counts=True)
    runs = zip(
        found.tolist(), key.split(counts.tolist()), values.split(counts.tolist()), strict=True
    )
    for piece, at_piece, some in runs:
        at = bisect_right(first, piece) - 1
        start = (piece - first[at]) * PIECE
        length = min(PIECE, weights[at].live.numel() - start)
        yield weights[at], encode(start, length, at_piece % PIECE, some.clone())


def _positions(targets: Targets, box: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
    """Return the positions of elements of the boxes ``box`` in their weights, int64."""
    boxes, device = targets.boxes, within.device
    position = targets.column("offsets", device, lambda: boxes.offsets)[box]
    if boxes.are_ranges:
        return position.add_(within)
    for dim in range(max(map(len, boxes.shapes))):
        # counted from the last dimension, which a box of fewer does not have
        sizes, strides, inner = (
            torch.tensor(column, device=device)[box]
            for column in zip(*map(partial(_dim, dim), boxes.shapes, boxes.strides), strict=True)
        )
        position += (within // inner) % sizes * strides
    return position


def _dim(dim: int, shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    """Return size, stride, and elements within one step, of a dimension counted from the last."""
    rank = len(shape)
    if dim >= rank:
        return 1, 0, 1
    return shape[-1 - dim], strides[-1 - dim], math.prod(shape[rank - dim :])
