"""What a job of the staging thread copies, piece by piece."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_inflight.scheduler.staging.pace import Pace


class PacedCopies(TorchFunctionMode):
    """Copies of the thread that enters it go piece by piece.

    A model's loader copies whole tensors. Torch asks a mode of this kind at each call from
    Python, and only on the thread that entered it.
    """

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.Tensor.copy_ or len(args) < 2 or args[0].shape != args[1].shape:
            return func(*args, **kwargs)
        target, source, *how = args
        for to, of in self._pace.cut(target, source):
            to.copy_(of, *how, **kwargs)
        return target
