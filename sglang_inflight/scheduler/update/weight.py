"""A weight of an open update, and elements that are moved into it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_inflight.scheduler.plans.moves import Box


class Weight(NamedTuple):
    """A served tensor that a commit exchanges, and its name."""

    name: str
    live: torch.Tensor


class Moved(NamedTuple):
    """Elements of a received tensor, and where they go in a weight. Both have one shape."""

    weight: Weight
    box: Box
    of: torch.Tensor


class Patch(NamedTuple):
    """Some elements of a weight: int64 positions in its memory, each once, and their values."""

    weight: Weight
    at: torch.Tensor
    values: torch.Tensor
