"""Reserves device memory for the shadow, before the KV cache takes the rest.

This module hooks ``Scheduler.init_memory_pools``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from sglang_inflight import capabilities
from sglang_inflight.hooking import BEFORE, SCHEDULER, hook
from sglang_inflight.scheduler.collectives import (
    is_true_on_any_rank,
)
from sglang_inflight.scheduler.forward_caches.caches import ForwardCaches
from sglang_inflight.scheduler.update.checks.stageable import device_of, why_stale
from sglang_inflight.scheduler.update.mode import StagingMode, choose_mode
from sglang_inflight.scheduler.update.shadow import weights_of
from sglang_inflight.settings import Settings
from sglang_inflight.vocabulary.errors import BadSetting

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import Scheduler

    class ReservingScheduler(Scheduler):
        """A scheduler with its models loaded, and two fields of ours."""

        inflight_reservation: Reservation | None
        # caches by the model's id
        inflight_forward_caches: dict[int, ForwardCaches]


class ReservedStorage(NamedTuple):
    """Storage for a copy of ``original``. A reference to ``original`` keeps its id unique."""

    original: torch.Tensor
    storage: torch.Tensor


@dataclass(frozen=True)
class Reservation:
    """The reserved ``storage`` by the id of its tensor; a tensor made later has none."""

    mode: StagingMode
    storage: dict[int, ReservedStorage] = field(default_factory=dict)

    def keep_for(self, originals: Iterable[torch.Tensor]) -> None:
        """Free the storage reserved for tensors other than ``originals``."""
        used = {id(original) for original in originals}
        for unused in self.storage.keys() - used:
            del self.storage[unused]

    def storage_for(self, original: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return storage like ``original`` on ``device``, reserved or new."""
        kept = self.storage.pop(id(original), None)
        if kept is not None and _are_alike(original, kept.storage):
            return kept.storage
        # pinned on the host, so that copies from and to a device do not block the host
        pinned = device.type == "cpu" and original.device.type != "cpu"
        return torch.empty_like(original.data, device=device, pin_memory=pinned)


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
    weights = weights_with_copies(models)
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


def weights_with_copies(models: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return the weights of ``models``, each once, even if shared with a draft."""
    weights = {id(weight): weight for model in models for _, weight in weights_of(model)}
    return [*weights.values()]


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype
