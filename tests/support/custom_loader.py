"""A user's weight loaders for ``--custom-weight-loader``."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

# time for many steps of a running loop
_STEPS_S = 1.0


def load_alone(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replace ``Tensor.copy_`` for the whole process during a load, like verl's delta loader.

    Raise ``RuntimeError`` if another thread copies meanwhile, as a decoding step does.
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


def load_masked(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load sparse tensors with a ``Tensor.copy_`` that leaves out NaN, like verl's delta loader.

    ``NAME.indices``, ``NAME.values`` and ``NAME.shape`` stand for the tensor NAME.
    """
    sent = dict(named_tensors)
    whole = []
    for name, shape in sent.items():
        base, _, part = name.rpartition(".")
        if part == "shape":
            values = sent[f"{base}.values"]
            tensor = torch.full((int(shape.prod()),), torch.nan, dtype=values.dtype)
            tensor[sent[f"{base}.indices"].long()] = values
            whole.append((base, tensor.view(*shape.tolist())))
    copy = torch.Tensor.copy_

    def copy_but_nan(self: torch.Tensor, of: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(of, torch.Tensor) and of.is_floating_point() and self.shape == of.shape:
            new = of.to(self.dtype)
            return copy(self, torch.where(new.isnan(), self, new))
        return copy(self, of, *args, **kwargs)

    torch.Tensor.copy_ = copy_but_nan  # type: ignore[method-assign, assignment]
    try:
        model.load_weights(whole)
    finally:
        torch.Tensor.copy_ = copy  # type: ignore[method-assign]
