"""Positions of elements: in a whole tensor, and in a region that one rank has of it.

A position counts the elements before one in the order of a contiguous tensor. Positions are tensors
of integers. Where a shape has no dimension there is one element, at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_inflight.vocabulary.regions import Region

if TYPE_CHECKING:
    import torch


def in_whole(at: torch.Tensor, region: Region, shape: Sequence[int]) -> torch.Tensor:
    """Return the int64 positions in a tensor of ``shape``. ``at``: those in its ``region``.

    Ascending positions stay ascending, because both orders compare the outer dimensions first.
    """
    import torch

    rest = at.to(torch.int64)
    if region.sizes == tuple(shape):
        return rest
    found, stride = torch.zeros_like(rest), 1
    for start, inner, size in zip(
        reversed(region.starts), reversed(region.sizes), reversed(shape), strict=True
    ):
        found += (rest % inner + start) * stride
        rest = rest // inner
        stride *= size
    return found


def are_within(at: torch.Tensor, region: Region, shape: Sequence[int]) -> torch.Tensor:
    """Return for each position ``at`` of a tensor of ``shape`` whether it lies in ``region``.

    ``at`` are positions of the tensor's own elements.
    """
    import torch

    found = torch.ones_like(at, dtype=torch.bool)
    rest = at
    for start, end, size in zip(
        reversed(region.starts), reversed(region.ends), reversed(shape), strict=True
    ):
        if (start, end) != (0, size):
            place = rest % size
            found &= (place >= start) & (place < end)
        rest = rest // size
    return found
