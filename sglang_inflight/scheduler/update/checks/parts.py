"""Checks of an update that brings the part of each tensor that a rank uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from sglang_inflight.scheduler.plans.record import Kind
from sglang_inflight.scheduler.update.checks.tensors import FLOATS
from sglang_inflight.vocabulary.errors import Refused, shorten
from sglang_inflight.vocabulary.regions import Region

_Named = tuple[str, torch.Tensor]


def refuse_unused(
    weights: Iterable[_Named], parts: Mapping[str, Region], kinds: Mapping[str, Kind]
) -> Iterator[_Named]:
    """Yield ``weights``. Raise ``Refused`` for one that is no part that the rank uses.

    Floats for a quantized tensor would be quantized apart from the others of their blocks.
    ``kinds``: of the served checkpoint's tensors.
    """
    for name, tensor in weights:
        if name not in parts:
            raise Refused(f"this rank uses no part of {shorten(name)!r}")
        if tensor.shape != parts[name].sizes:
            raise Refused(
                f"the part of {shorten(name)!r} has the shape {list(tensor.shape)}, and this rank "
                f"uses {list(parts[name].sizes)} of it"
            )
        kind = kinds[name]
        if tensor.dtype != kind.dtype and not {tensor.dtype, kind.dtype} <= FLOATS:
            raise Refused(
                f"tensor {shorten(name)!r} is {tensor.dtype}, and {kind.dtype} in the served "
                "checkpoint: send parts in that dtype"
            )
        yield name, tensor


def refuse_parts(
    weights: Iterable[_Named], kinds: Mapping[str, Kind], role: str
) -> Iterator[_Named]:
    """Yield ``weights`` for the model's loader. Raise ``Refused`` for a part.

    The loader would take a part for a whole tensor.
    """
    for name, tensor in weights:
        if tensor.shape != kinds[name].shape:
            raise Refused(
                f"a part of {shorten(name)!r} came, and the {role} model's loader writes its "
                "weight in this update: send the version by whole tensors"
            )
        yield name, tensor
