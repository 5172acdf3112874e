"""Reserves device memory for the shadow, before the KV cache takes the rest.

This module hooks ``Scheduler.init_memory_pools``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from sglang_inflight import capabilities
from sglang_inflight.hooking import BEFORE, SCHEDULER, hook
from sglang_inflight.scheduler.collectives import (
    is_true_on_any_rank,
)
from sglang_inflight.scheduler.update.attributes import attributes_of, tensors_in
from sglang_inflight.scheduler.update.checks.stageable import device_of, why_stale
from sglang_inflight.scheduler.update.forward_caches import ForwardCaches
from sglang_inflight.scheduler.update.mode import StagingMode, choose_mode
from sglang_inflight.scheduler.update.shadow import ReservedStorage, weights_of
from sglang_inflight.settings import Settings
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import BadSetting

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import Scheduler

    class ReservingScheduler(Scheduler):
        """A scheduler with its models loaded, and two fields of ours."""

        inflight_reservation: Reservation | None
        # caches by the model's id
        inflight_forward_caches: dict[int, ForwardCaches]


@dataclass(frozen=True)
class Reservation:
    """The reserved ``storage`` by the id of its tensor; a tensor made later has none."""

    mode: StagingMode
    storage: dict[int, ReservedStorage] = field(default_factory=dict)


@hook(f"{SCHEDULER}.init_memory_pools", BEFORE)
def reserve_shadow(scheduler: ReservingScheduler) -> None:
    settings = Settings.from_environment()
    scheduler.inflight_reservation = reserve(scheduler, settings.staging)
    models = loaded_models(scheduler)
    scheduler.inflight_forward_caches = {id(model): ForwardCaches(model) for model in models}


def reserve(scheduler: Scheduler, wanted: str) -> Reservation | None:
    """Choose the mode, and reserve its device memory. Return None on a CPU.

    A server that can stage no update keeps all memory for the KV cache.

    Call on the loop's thread, on all ranks of the replica, after all models are loaded. SGLang
    then gives the KV cache the free memory, and later nothing is free.
    """
    models = loaded_models(scheduler)
    device = device_of(models[0])
    if device.type == "cpu":
        return None
    weights = tensors_copied_by_shadow(models)
    nbytes = sum(weight.nbytes for weight in weights)
    why_not = capabilities.of(scheduler.server_args).stage or next(
        filter(None, map(why_stale, models)), None
    )
    mode = choose_mode(wanted, nbytes, device, why_not=why_not)
    # a rank unable to stage votes against every update, so no rank needs a shadow
    if mode is not StagingMode.DEVICE or is_true_on_any_rank(why_not is not None):
        return Reservation(mode)
    storage = reserve_storage(weights, device)
    if storage is None:
        raise BadSetting(
            f"SGLANG_INFLIGHT_STAGING=device: there are no {nbytes >> 20} MiB free on {device} "
            "for a second copy of the weights"
        )
    return Reservation(mode, storage)


def loaded_models(scheduler: Scheduler) -> list[nn.Module]:
    """Return the target and its drafts, after all models are loaded."""
    workers = [scheduler.tp_worker, scheduler.draft_worker]
    return [
        runner.model
        for worker in workers
        if worker is not None
        for _, runner in worker.weight_update_runners()
    ]


def reserve_storage(
    weights: Iterable[torch.Tensor], device: torch.device
) -> dict[int, ReservedStorage] | None:
    """Return storage for the shadows of ``weights``; None, and none taken, if it does not fit."""
    storage: dict[int, ReservedStorage] = {}
    try:
        for weight in weights:
            storage[id(weight)] = ReservedStorage(
                weight, torch.empty_like(weight.data, device=device)
            )
    except torch.OutOfMemoryError:
        pass
    else:
        return storage
    # not in the except block: the exception keeps its frames' tensors alive there
    storage.clear()
    torch.get_device_module(device).empty_cache()
    return None


def tensors_copied_by_shadow(models: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return the tensors with a copy in a shadow, each once, even if shared with a draft.

    A tensor in a weight's memory becomes a view of the weight's shadow, and no copy.
    """
    models = list(models)
    weights = {id(weight): weight for model in models for _, weight in weights_of(model)}
    memory = {memory_key(weight) for weight in weights.values()}
    others: dict[int, torch.Tensor] = {}
    for model in models:
        device = next(model.parameters()).device
        others |= {
            id(tensor): tensor
            for module in model.modules()
            for _, value in attributes_of(module)
            for tensor in tensors_in(value)
            # a scale kept on the host stays there
            if tensor.device == device and memory_key(tensor) not in memory
        }
    return [*weights.values(), *others.values()]
