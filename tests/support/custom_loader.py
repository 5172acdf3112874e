"""A weight loader of a user's, as ``--custom-weight-loader`` names it to a server."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

# in which a loop that runs makes many steps
_STEPS_S = 1.0


def load_alone(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replace ``Tensor.copy_`` for a while, as verl's delta loader does, which is everybody's.

    Raises ``RuntimeError`` where another thread copies meanwhile, as a step of decoding does.
    """
    copy, own, met = torch.Tensor.copy_, threading.get_ident(), threading.Event()

    def copy_and_look(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if threading.get_ident() != own:
            met.set()
        return copy(self, *args, **kwargs)

    torch.Tensor.copy_ = copy_and_look  # type: ignore[method-assign, assignment]
    try:
        model.load_weights(list(named_tensors))
        if met.wait(_STEPS_S):
            raise RuntimeError("a step was made with the copy_ of this loader")
    finally:
        torch.Tensor.copy_ = copy  # type: ignore[method-assign]
