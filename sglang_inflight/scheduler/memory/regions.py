"""Which tensors are in which kind of memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import psutil
import torch

from sglang_inflight.scheduler.memory.machine import KV_CACHE, WEIGHTS
from sglang_inflight.scheduler.update.attributes import attributes_of, tensors_in
from sglang_inflight.scheduler.update.checks.coverage import can_mark
from sglang_inflight.scheduler.update.shadow import weights_of
from sglang_inflight.storages import give_back_freed, memory_of

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.model_runner import ModelRunner
    from sglang_inflight.scheduler.sglang_types.scheduler import Scheduler

# its malloc_trim is GNU's alone
_LIBC = ctypes.CDLL(None)
# where SGLang's pools for the reference platform's attention keep keys and values
_BUFFERS = ("k_buffer", "v_buffer", "kv_buffer")


class MemoryRegions:
    """Asked for anew each time, because a commit may have put other storage in place."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def device(self) -> torch.device:
        return next(self._runners[0].model.parameters()).device

    def of(self, kind: str) -> Iterator[torch.Tensor]:
        """What a memory saver that does not note regions gives back."""
        if kind == WEIGHTS:
            for runner in self._runners:
                yield from runner.model.parameters()
                yield from runner.model.buffers()
        elif kind == KV_CACHE:
            yield self._scheduler.req_to_token_pool.req_to_token
            for runner in self._runners:
                for name in _BUFFERS:
                    buffers: Any = getattr(runner.token_to_kv_pool, name, None)
                    yield from buffers or ()

    def all_of_models(self) -> Iterator[torch.Tensor]:
        """All that came with loading them."""
        yield from self.of(WEIGHTS)
        yield from self._beside_weights()

    def tensors_not_in_checkpoints(self) -> Iterator[torch.Tensor]:
        """Rotary tables and the like, and weights of which it cannot be told what was sent.

        They are small, and are kept whatever becomes of the weights.
        """
        yield from self._beside_weights()
        for runner in self._runners:
            parameters = {id(parameter) for parameter in runner.model.parameters()}
            for _, weight in weights_of(runner.model):
                # a model may set a buffer of its own that no checkpoint has
                if not can_mark(weight) or id(weight) not in parameters:
                    yield weight

    def _beside_weights(self) -> Iterator[torch.Tensor]:
        weights = {
            memory_of(weight) for runner in self._runners for _, weight in weights_of(runner.model)
        }
        for runner in self._runners:
            for module in runner.model.modules():
                for _, value in attributes_of(module):
                    for tensor in tensors_in(value):
                        if memory_of(tensor) not in weights:
                            yield tensor

    @property
    def _runners(self) -> Sequence[ModelRunner]:
        return [runner for _, runner in self._scheduler.weight_updater._select_runners("all")]


def trim(device: torch.device) -> None:
    """Allocators keep what is freed for the next who asks: others are to have it."""
    if device.type != "cpu":
        give_back_freed(device)
    elif hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def bytes_in_use(device: torch.device) -> int:
    """Bytes of the device that anybody uses. On the host, the anonymous pages of this process: the
    kernel reclaims pages of files as it likes."""
    if device.type == "cpu":
        memory = psutil.Process().memory_info()
        resident: int = memory.rss - memory.shared
        return resident
    free, total = torch.get_device_module(device).mem_get_info(device)
    in_use: int = total - free
    return in_use
