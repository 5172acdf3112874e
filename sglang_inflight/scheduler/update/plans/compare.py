"""Compares what moves bring with what is served, for many small tensors at once.

    gather     the new elements into one row, and the served ones at their places into another
    compare    the two rows
    scatter    each difference's position in the row to its position in its weight

So the interpreter's work is a few microseconds a copy, whatever the number of weights.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from sglang_inflight.scheduler.update.changes.encoding import (
    OFFSET_BYTES,
    PIECE,
    Part,
    bits_of,
    encode,
    positions_in,
)
from sglang_inflight.scheduler.update.weight import Weight


class Copy(NamedTuple):
    """Elements for a part of a served weight: ``to`` is a view of it, ``of`` has its shape."""

    weight: Weight
    to: torch.Tensor
    of: torch.Tensor


def compare(copies: Sequence[Copy], device: torch.device) -> Iterator[tuple[Weight, Part]]:
    """Yield the weights that ``copies`` would change, and how, compared on ``device``.

    The weights have one dtype and device, and no element is in two copies. Needs memory for four
    times the copies' elements, and for thirty bytes a change.
    """
    if not copies:
        return
    first = copies[0].to
    new = torch.cat([_row(copy.of, device, first.dtype) for copy in copies])
    served = torch.cat([_row(copy.to, device, first.dtype) for copy in copies])
    bits = bits_of(new)
    at = positions_in((bits ^ bits_of(served)).bool())
    del served
    if not len(at):
        return
    sizes = [copy.to.numel() for copy in copies]
    ends = torch.tensor([*accumulate(sizes)], device=device)
    counts = torch.searchsorted(at, ends).diff(prepend=ends.new_zeros(1))
    row = torch.repeat_interleave(counts, output_size=len(at))
    width = new.element_size()
    if len(at) * (width + OFFSET_BYTES) >= len(new) * width:
        # values of whole ranges cost less, but a range must be one in the weight
        is_one = [copy.to.is_contiguous() for copy in copies]
        yield from _whole(copies, sizes, bits, counts.tolist(), is_one)
        if all(is_one):
            return
        rest = ~torch.tensor(is_one, device=device)[row]
        at, row = at[rest], row[rest]
    if len(at):
        within = at - (ends - torch.tensor(sizes, device=device))[row]
        yield from _changed(copies, row, within, bits[at])


def _row(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype != dtype or tensor.device != device:
        tensor = tensor.to(device, dtype)
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def _whole(
    copies: Sequence[Copy],
    sizes: Sequence[int],
    bits: torch.Tensor,
    counts: Sequence[int],
    is_one: Sequence[bool],
) -> Iterator[tuple[Weight, Part]]:
    """Yield all values of the copies that are one range of their weight.

    Ranges side by side are one, unless none of their elements changes.
    """
    ends = [*accumulate(sizes)]
    ranges = sorted(
        (id(copy.weight.live), _start(copy), at)
        for at, copy in enumerate(copies)
        if is_one[at] and sizes[at]
    )
    run: list[int] = []
    last = (0, 0)
    for weight, start, at in ranges:
        if last != (weight, start):
            yield from _joined(copies, run, ends, bits, counts)
            run = []
        run.append(at)
        last = weight, start + sizes[at]
    yield from _joined(copies, run, ends, bits, counts)


def _joined(
    copies: Sequence[Copy],
    run: Sequence[int],
    ends: Sequence[int],
    bits: torch.Tensor,
    counts: Sequence[int],
) -> Iterator[tuple[Weight, Part]]:
    """Yield the values of the copies ``run``, which lie side by side in their weight."""
    if not (count := sum(counts[at] for at in run)):
        return
    start = _start(copies[run[0]])
    values = torch.cat([bits[ends[at - 1] if at else 0 : ends[at]] for at in run])
    for first, some in enumerate(torch.split(values, PIECE)):
        # the first piece stands for all
        changed = 0 if first else count
        own = some if len(some) == len(values) else some.clone()
        yield copies[run[0]].weight, Part(start + first * PIECE, len(own), own, changed=changed)


def _changed(
    copies: Sequence[Copy], row: torch.Tensor, within: torch.Tensor, values: torch.Tensor
) -> Iterator[tuple[Weight, Part]]:
    """Yield the changes by pieces of weights. ``within``: positions in their copies (``row``)."""
    number: dict[int, int] = {}
    weights: list[Weight] = []
    of_copy = []
    for copy in copies:
        at = number.setdefault(id(copy.weight.live), len(weights))
        if at == len(weights):
            weights.append(copy.weight)
        of_copy.append(at)
    pieces = [-(-weight.live.numel() // PIECE) for weight in weights]
    first = [0, *accumulate(pieces)]
    key = _positions(copies, row, within)
    key += torch.tensor([first[at] * PIECE for at in of_copy], device=key.device)[row]
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


def _positions(copies: Sequence[Copy], row: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
    """Return the positions of elements of the copies ``row`` in their weights, int64."""
    device = within.device
    position = torch.tensor([_start(copy) for copy in copies], device=device)[row]
    if all(copy.to.dim() <= 1 and copy.to.is_contiguous() for copy in copies):
        return position.add_(within)
    for dim in range(max(copy.to.dim() for copy in copies)):
        # counted from the last dimension, which a copy of fewer does not have
        sizes, strides, inner = (
            torch.tensor(column, device=device)[row]
            for column in zip(*(_dim(copy.to, dim) for copy in copies), strict=True)
        )
        position += (within // inner) % sizes * strides
    return position


def _dim(view: torch.Tensor, dim: int) -> tuple[int, int, int]:
    """Return size, stride, and elements within one step, of a dimension counted from the last."""
    if dim >= view.dim():
        return 1, 0, 1
    shape = view.shape
    return shape[-1 - dim], view.stride(-1 - dim), math.prod(shape[len(shape) - dim :])


def _start(copy: Copy) -> int:
    return int(copy.to.storage_offset()) - int(copy.weight.live.storage_offset())
