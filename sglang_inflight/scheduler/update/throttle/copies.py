"""What a model's loader copies, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_inflight.scheduler.update.throttle.rate import RateLimit


@contextmanager
def rate_limited(
    rate_limit: RateLimit, target: torch.Tensor, source: torch.Tensor
) -> Iterator[None]:
    """Around what copies ``source``, or a part of it, to ``target`` or a part of it."""
    nbytes = min(target.numel(), source.numel()) * (target.itemsize + source.itemsize)
    if rate_limit.is_one_piece(nbytes):
        yield
        rate_limit.spend(nbytes)
    else:
        with RateLimitedCopies(rate_limit):
            yield


class RateLimitedCopies(TorchFunctionMode):
    """Copies of the thread that enters it go piece by piece.

    A model's loader copies whole tensors. Torch asks a mode of this kind at each call from
    Python, and only on the thread that entered it. The asking costs time in which the loop
    has to wait for the interpreter, so it is for large tensors.
    """

    def __init__(self, rate_limit: RateLimit) -> None:
        super().__init__()
        self._rate_limit = rate_limit

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.Tensor.copy_ or len(args) < 2 or args[0].shape != args[1].shape:
            return func(*args, **kwargs)
        target, source, *how = args
        for to, of in self._rate_limit.cut(target, source):
            to.copy_(of, *how, **kwargs)
        return target
