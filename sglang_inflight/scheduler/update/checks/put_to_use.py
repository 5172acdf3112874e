"""Which tensors of a checkpoint a model's loader puts to use on this rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from sglang_inflight.scheduler.update.checks.dataflow import Dataflow
from sglang_inflight.scheduler.update.shadow import Shadow, ShadowParameters

logger = logging.getLogger(__name__)

_NOWHERE = torch.device("meta")


class PutToUse(NamedTuple):
    """How a loader uses a checkpoint."""

    # the names of tensors that reach a weight, or what is derived of weights
    tensors: frozenset[str]
    # the names of parameters and buffers that the checkpoint does not write; None where that is
    # not known
    weights_left_out: frozenset[str] | None


def find_put_to_use(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> PutToUse:
    """Which tensors of the checkpoint of ``shapes`` the loader of ``model`` puts to use.

    A loader skips the layers of other pipeline stages, the tensors of a draft, tables that the
    model computes, and a tied head. It also holds a tensor until the one comes that it is fused
    with. Names do not tell the two apart, so the loader is run once, on tensors without memory,
    with a clone of the model that has none. ``dtype`` is that of the tensors.

    A loader that cannot be run so is believed as far as it came: a tensor that it did not take by
    then is not among the names. The live model is only read.
    """
    twin = Shadow(model, ShadowParameters(), _NOWHERE)
    twin.begin()
    written: set[str] = set()
    dataflow = Dataflow(twin.targets(), before_write=lambda write: written.add(write.target.name))
    loader: Any = twin.model
    left_out: frozenset[str] | None = None
    try:
        with torch.no_grad(), dataflow:
            loader.load_weights(_without_memory(shapes, dtype, dataflow))
        left_out = frozenset(name for name, _, _ in twin.pairs) - written
    except Exception as error:
        logger.debug("The loader was run without memory as far as: %s", error)
    return PutToUse(frozenset(dataflow.reached), left_out)


def _without_memory(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, dataflow: Dataflow
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in shapes.items():
        with dataflow.standing_by():
            tensor: Any = torch.empty(shape, dtype=dtype, device=_NOWHERE)
        # the mark by which upstream's loaders use no threads
        tensor._sglang_runai_streamer_tensor = True
        dataflow.receive(name, tensor, is_alone=True)
        yield name, tensor
    dataflow.receive_no_more()
