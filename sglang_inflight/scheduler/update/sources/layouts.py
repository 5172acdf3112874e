"""Names, dtypes and shapes of tensors sent as mere bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sglang_inflight.vocabulary.errors import Refused


@dataclass(frozen=True)
class Layout:
    name: str
    dtype: torch.dtype
    shape: list[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_layouts(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> list[Layout]:
    """Return one layout for each name. Raise ``Refused`` if they describe no tensors."""
    if not len(names) == len(dtypes) == len(shapes):
        raise Refused(
            f"names, dtypes and shapes must be of one length, not {len(names)}, "
            f"{len(dtypes)} and {len(shapes)}"
        )
    if any(size < 0 for shape in shapes for size in shape):
        raise Refused("shapes holds a negative size")
    return [
        Layout(name, _dtype(dtype), shape)
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise Refused(f"dtypes holds {name!r}, which is not a dtype of torch")
    return dtype
