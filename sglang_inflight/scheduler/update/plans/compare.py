"""Compares what moves bring with what is served, for many small tensors at once.

    gather     the new elements into one row, and the served ones at their places into another
    compare    the two rows
    scatter    each difference's position in the row to its position in its weight

So the interpreter's work is a few microseconds a copy, whatever the number of weights.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
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
from sglang_inflight.scheduler.update.plans.plan import Copy


class Compared(NamedTuple):
    place: str
    part: Part


def compare(copies: Sequence[Copy], weights: Mapping[str, torch.Tensor]) -> Iterator[Compared]:
    """Yield where ``copies`` would change ``weights``.

    The copies' ``to`` are views of ``weights``, which have one dtype and device. No element is in
    two copies. Needs memory for four times the copies' elements, and for thirty bytes a change.
    """
    if not copies:
        return
    sizes = [copy.to.numel() for copy in copies]
    first = copies[0].to
    new, served = (
        torch.empty(sum(sizes), dtype=first.dtype, device=first.device) for _ in range(2)
    )
    torch._foreach_copy_(_shaped(new, copies, sizes), [copy.of for copy in copies])
    torch._foreach_copy_(_shaped(served, copies, sizes), [copy.to for copy in copies])
    bits = bits_of(new)
    at = positions_in((bits ^ bits_of(served)).bool())
    del served
    if not len(at):
        return
    ends = torch.tensor(sizes, device=at.device).cumsum(0)
    row = torch.searchsorted(ends, at, right=True)
    width = new.element_size()
    if len(at) * (width + OFFSET_BYTES) >= len(new) * width:
        # values of whole ranges cost less, but a range must be one in the weight
        yield from _whole(copies, sizes, bits, torch.bincount(row, minlength=len(sizes)), weights)
        is_one = torch.tensor([copy.to.is_contiguous() for copy in copies], device=at.device)
        at, row = (each[~is_one[row]] for each in (at, row))
    if len(at):
        within = at - (ends - torch.tensor(sizes, device=at.device))[row]
        yield from _changed(copies, row, within, bits[at], weights)


def _shaped(row: torch.Tensor, copies: Sequence[Copy], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the parts of ``row`` for the copies, each of its copy's shape."""
    return [
        part if copy.to.dim() == 1 else part.view(copy.to.shape)
        for part, copy in zip(torch.split(row, sizes), copies, strict=True)
    ]


def _whole(
    copies: Sequence[Copy],
    sizes: Sequence[int],
    bits: torch.Tensor,
    counts: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
) -> Iterator[Compared]:
    """Yield all values of each copy with a change, as far as it is one range of its weight."""
    values = torch.split(bits, sizes)
    for copy, value, count in zip(copies, values, counts.tolist(), strict=True):
        if count and copy.to.is_contiguous():
            start = _start(copy, weights)
            for first in range(0, len(value), PIECE):
                some = value[first : first + PIECE].clone()
                # the first piece stands for all
                changed = 0 if first else count
                yield Compared(copy.place, Part(start + first, len(some), some, changed=changed))


def _changed(
    copies: Sequence[Copy],
    row: torch.Tensor,
    within: torch.Tensor,
    values: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
) -> Iterator[Compared]:
    """Yield the changes by pieces of weights. ``within``: positions in their copies (``row``)."""
    places = list(dict.fromkeys(copy.place for copy in copies))
    number = {place: at for at, place in enumerate(places)}
    pieces = [-(-weights[place].numel() // PIECE) for place in places]
    first = [0, *accumulate(pieces)]
    key = _positions(copies, row, within, weights)
    key += torch.tensor([first[number[copy.place]] * PIECE for copy in copies]).to(key.device)[row]
    if bool((key[1:] < key[:-1]).any()):
        key, order = key.sort()
        values = values[order]
    found, counts = torch.unique_consecutive(key // PIECE, return_counts=True)
    runs = zip(
        found.tolist(), key.split(counts.tolist()), values.split(counts.tolist()), strict=True
    )
    for piece, at, some in runs:
        place = places[bisect_right(first, piece) - 1]
        start = (piece - first[number[place]]) * PIECE
        length = min(PIECE, weights[place].numel() - start)
        yield Compared(place, encode(start, length, at % PIECE, some.clone()))


def _positions(
    copies: Sequence[Copy],
    row: torch.Tensor,
    within: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Return the positions of elements of the copies ``row`` in their weights, int64."""
    device = within.device
    position = torch.tensor([_start(copy, weights) for copy in copies], device=device)[row]
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


def _start(copy: Copy, weights: Mapping[str, torch.Tensor]) -> int:
    return int(copy.to.storage_offset()) - int(weights[copy.place].storage_offset())
