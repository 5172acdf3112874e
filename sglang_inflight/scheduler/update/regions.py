"""Lists the tensors in each kind of memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import psutil
import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS

from sglang_inflight.scheduler.update.attributes import attributes_of, tensors_in
from sglang_inflight.scheduler.update.checks.coverage import can_mark
from sglang_inflight.scheduler.update.shadow import weights_of
from sglang_inflight.storages import give_back_freed, memory_key

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_inflight.sglang_types import Scheduler

# only glibc has malloc_trim
_LIBC = ctypes.CDLL(None)
# attributes with keys and values in SGLang's pools for the reference platform's attention
_BUFFERS = ("k_buffer", "v_buffer", "kv_buffer")


class MemoryRegions:
    """The tensors of one scheduler. Listed anew by each call: a commit may replace storages."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def device(self) -> torch.device:
        return next(self._runners[0].model.parameters()).device

    def of(self, kind: str) -> Iterator[torch.Tensor]:
        """Yield the tensors of ``kind``, for a memory saver without a record of allocations."""
        if kind == GPU_MEMORY_TYPE_WEIGHTS:
            for runner in self._runners:
                yield from runner.model.parameters()
                yield from runner.model.buffers()
        elif kind == GPU_MEMORY_TYPE_KV_CACHE:
            yield self._scheduler.req_to_token_pool.req_to_token
            for runner in self._runners:
                for name in _BUFFERS:
                    buffers: Any = getattr(runner.token_to_kv_pool, name, None)
                    yield from buffers or ()

    def all_of_models(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that loading the models has made."""
        yield from self.of(GPU_MEMORY_TYPE_WEIGHTS)
        yield from self._beside_weights()

    def tensors_not_in_checkpoints(self) -> Iterator[torch.Tensor]:
        """Yield rotary tables and the like, and weights whose written elements are not counted.

        These tensors are small, and are kept even when the weights are discarded.
        """
        yield from self._beside_weights()
        for runner in self._runners:
            parameters = {id(parameter) for parameter in runner.model.parameters()}
            for _, weight in weights_of(runner.model):
                # no checkpoint has a model's own buffers
                if not can_mark(weight) or id(weight) not in parameters:
                    yield weight

    def weights_of_drafts(self) -> dict[str, list[torch.Tensor]]:
        """Return the weights of each draft, by role, without those that the target shares."""
        found: dict[str, list[torch.Tensor]] = {}
        shared: set[int] = set()
        for role, runner in self._scheduler.weight_updater._select_runners("all"):
            weights = [weight for _, weight in weights_of(runner.model)]
            if role == "target":
                shared.update(map(memory_key, weights))
            else:
                own = [weight for weight in weights if memory_key(weight) not in shared]
                found.setdefault(role, []).extend(own)
        return found

    def _beside_weights(self) -> Iterator[torch.Tensor]:
        weights = {
            memory_key(weight) for runner in self._runners for _, weight in weights_of(runner.model)
        }
        for runner in self._runners:
            for module in runner.model.modules():
                for _, value in attributes_of(module):
                    for tensor in tensors_in(value):
                        if memory_key(tensor) not in weights:
                            yield tensor

    @property
    def _runners(self) -> Sequence[ModelRunner]:
        return [runner for _, runner in self._scheduler.weight_updater._select_runners("all")]


def trim(device: torch.device) -> None:
    """Return freed memory from the allocators to the system."""
    if device.type != "cpu":
        give_back_freed(device)
    elif hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def bytes_in_use(device: torch.device) -> int:
    """Return the bytes of the device in use by all processes.

    On the host, return this process's anonymous pages only: the kernel reclaims file pages.
    """
    if device.type == "cpu":
        memory = psutil.Process().memory_info()
        resident: int = memory.rss - memory.shared
        return resident
    free, total = torch.get_device_module(device).mem_get_info(device)
    in_use: int = total - free
    return in_use
