"""A copy that gives way to decoding."""

from __future__ import annotations

from typing import Any

import torch

from sglang_inflight.scheduler.update.throttle.rate import RateLimit


def copy_in_pieces(
    rate_limit: RateLimit, target: torch.Tensor, source: torch.Tensor, *how: Any, **options: Any
) -> None:
    """Do ``target.copy_(source)``, no faster than ``rate_limit`` allows.

    ``how`` and ``options`` are arguments of ``torch.Tensor.copy_``. A source of another shape,
    for torch to expand, is copied at once.
    """
    if target.shape != source.shape:
        target.copy_(source, *how, **options)
        rate_limit.spend(target.nbytes + source.nbytes)
        return
    for to, of in rate_limit.cut(target, source):
        to.copy_(of, *how, **options)
