"""Finds the tensors of a checkpoint used by a model's loader on this rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from sglang_inflight.scheduler.update.checks.dataflow import Dataflow, Kind, Write
from sglang_inflight.scheduler.update.shadow import Shadow, refresh_derived

logger = logging.getLogger(__name__)

_NOWHERE = torch.device("meta")


class LoaderReads(NamedTuple):
    """How a loader uses a checkpoint."""

    # names of the tensors that reach a weight or a derived tensor
    tensors: frozenset[str]
    # names of the parameters and buffers not written by the checkpoint; None if unknown
    weights_left_out: frozenset[str] | None
    # names of the tensors besides weights that the loader writes
    derived: frozenset[str]


def find_loader_reads(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> LoaderReads:
    """Return the tensors of a checkpoint of ``shapes`` used by the loader of ``model``.

    A loader skips the layers of other pipeline stages, the tensors of a draft, tables computed by
    the model, and a tied head. A loader also holds a tensor until its partner in a fused parameter
    comes. Names do not distinguish the two. So the loader runs once on tensors without memory,
    with a clone of the model without memory. ``dtype`` is the dtype of these tensors.

    If the loader fails in this run, the tensors used until then are returned. The live model is
    only read.
    """
    twin = Shadow(model, _NOWHERE)
    twin.begin()
    written: set[str] = set()
    derived: set[str] = set()

    def note(write: Write) -> None:
        (derived if write.target.kind is Kind.DERIVED else written).add(write.target.name)

    dataflow = Dataflow(twin.targets(), before_write=note)
    loader: Any = twin.model
    left_out: frozenset[str] | None = None
    try:
        with torch.no_grad(), dataflow:
            loader.load_weights(dataflow.receive_each(_without_memory(shapes, dtype)))
        left_out = frozenset(name for name, _, _ in twin.pairs) - written
    except Exception as error:
        logger.debug("The loader's run on tensors without memory ended early: %s", error)
    return LoaderReads(frozenset(dataflow.reached), left_out, frozenset(derived))


def find_refreshed(model: nn.Module) -> frozenset[str]:
    """Return the names of the tensors that ``refresh_derived`` recomputes from the weights."""
    twin = Shadow(model, _NOWHERE)
    twin.begin()
    written: set[str] = set()
    dataflow = Dataflow(twin.targets(), before_write=lambda write: written.add(write.target.name))
    with torch.no_grad(), dataflow:
        refresh_derived(twin.model)
    return frozenset(written)


def _without_memory(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in shapes.items():
        yield name, torch.empty(shape, dtype=dtype, device=_NOWHERE)
