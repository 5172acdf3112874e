"""Runs a model's loader on tensors without memory, to record where it puts them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from sglang_inflight.scheduler.plans.recorder import Recorded, Recorder
from sglang_inflight.scheduler.update.attributes import attributes_of, modules_of, tensors_in
from sglang_inflight.scheduler.update.checks.dataflow import Kind as Written
from sglang_inflight.scheduler.update.finished.places import Number, numbers_of
from sglang_inflight.scheduler.update.rate import yield_gil
from sglang_inflight.scheduler.update.shadow import (
    Shadow,
    refresh_derived,
    weights_of,
)
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import describe

logger = logging.getLogger(__name__)

_NOWHERE = torch.device("meta")
# runs after which a loader that fails again and again has no plan
_MOST_RUNS = 12
_WITHOUT_MEMORY = "the loader fails on a tensor without memory"


class Kind(NamedTuple):
    """Shape and dtype of a tensor of the checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def kinds_of(stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Kind]:
    """Return the kinds of tensors by name: one object for all equal ones."""
    shared: dict[Kind, Kind] = {}
    kinds = {}
    for name, (shape, dtype) in stored.items():
        kind = Kind(shape, dtype)
        kinds[name] = shared.setdefault(kind, kind)
    return kinds


def record(model: nn.Module, tensors: Mapping[str, Kind]) -> Recorded:
    """Return where the loader of ``model`` puts each of ``tensors``, in their order.

    ``model`` is in the layout of its checkpoint, and is only read.

    A tensor at which the loader fails has no moves, and the loader runs again without it and those
    like it in other layers. A loader that fails without a tensor, too, has no plan at all.
    """
    left_out: dict[str, str] = {}
    reached: set[str] = set()
    why = ""
    for _ in range(_MOST_RUNS):
        present = {name: kind for name, kind in tensors.items() if name not in left_out}
        recorder, recorded, why = _run(model, present)
        if recorded is not None:
            if not left_out:
                return recorded
            unplanned = {**recorded.unplanned, **left_out}
            reached |= recorded.reached
            return recorded._replace(
                unplanned=unplanned, unwritten=None, reached=frozenset(reached)
            )
        reached |= recorder.reached
        if recorder.current is None:
            break
        alike = _pattern(recorder.current)
        reason = f"{_WITHOUT_MEMORY}: {why}"
        left_out |= {name: reason for name in present if _pattern(name) == alike}
    unplanned = dict.fromkeys(tensors, f"the loader fails: {why}")
    return Recorded({}, unplanned, reached=frozenset(reached))


def why_not_apart(
    model: nn.Module, tensors: Mapping[str, Kind], by_loader: Mapping[str, str]
) -> str | None:
    """Return why the loader of ``model`` takes no part of its ``tensors`` alone, or None.

    ``by_loader``: the tensors that it would get, with the reason why it gets them.
    """
    apart = {n: tensors[n] for n, why in by_loader.items() if not why.startswith(_WITHOUT_MEMORY)}
    if not apart:
        return None
    _, recorded, why = _run(model, apart)
    return f"the loader fails without other tensors: {why}" if recorded is None else None


def _run(model: nn.Module, tensors: Mapping[str, Kind]) -> tuple[Recorder, Recorded | None, str]:
    """Return the recorder of one run, and what it records; or None, and why the loader failed."""
    twin = Shadow(model, _NOWHERE)
    twin.begin()
    leave_unfinished(twin.model)
    recorder = Recorder(twin.targets())
    constructed = _numbers_of(twin.model)
    loader: Any = twin.model
    try:
        with torch.no_grad(), recorder:
            refresh_derived(twin.model)
            refreshed = recorder.take_written(Written.DERIVED)
            recorder.take_written(Written.WEIGHT)
            loader.load_weights(recorder.receive_each(_without_memory(tensors)))
            derived = recorder.take_written(Written.DERIVED)
            unwritten = {name for name, _, _ in twin.pairs} - recorder.take_written(Written.WEIGHT)
            # what it computes from weights is no move
            refresh_derived(twin.model)
    except Exception as error:
        logger.debug("The loader's run ended at %s", recorder.current, exc_info=True)
        return recorder, None, describe(error)
    now = dict(weights_of(twin.model))
    for name, _, shadow in twin.pairs:
        if name not in now or memory_key(now[name]) != memory_key(shadow):
            recorder.spoil(shadow, "the loader replaces it")
    for path, module in modules_of(twin.model):
        named = (*module._parameters.items(), *module._buffers.items(), *attributes_of(module))
        for name, value in named:
            for tensor in tensors_in(value, also_without_memory=True):
                recorder.note_kept(tensor, f"the loader makes {path + '.' if path else ''}{name}")
    numbers = dict(_numbers_of(twin.model).items() - constructed.items())
    found = recorder.result()._replace(
        numbers=numbers, unwritten=frozenset(unwritten), derived=derived, refreshed=refreshed
    )
    return recorder, found, ""


def leave_unfinished(model: nn.Module) -> None:
    """Let the loader of ``model`` finish nothing, as some do after the last tensor."""
    module: Any
    for _, module in modules_of(model):
        if hasattr(module, "post_load_weights"):
            module.post_load_weights = _finish_nothing


def _without_memory(tensors: Mapping[str, Kind]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (shape, dtype) in tensors.items():
        yield_gil()
        yield name, torch.empty(shape, dtype=dtype, device=_NOWHERE)


def _numbers_of(model: nn.Module) -> dict[str, Number]:
    return {str(place): number for place, (_, _, number) in numbers_of(model).items()}


def _finish_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)
