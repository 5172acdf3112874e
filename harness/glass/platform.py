"""SGLang's server on the glass card: an out-of-tree platform of the device type ``glass``.

Scheduler, overlap, graphs and pools run as on CUDA. Kernels are torch's own, and two launches stand
in for kernels over addresses: attention (``csrc/attention.cpp``), which SGLang's ``torch_native``
backend would make with a wait of the host for each sequence, and our exchange of changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.platforms.device_mixin import DeviceCapability, PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# this device's name for torch, its attention backend for SGLang, and its collectives
NAME = "glass"


def activate() -> str | None:
    """Return the platform's class, or None in a process without the card."""
    return f"{__name__}:GlassPlatform" if hasattr(torch, NAME) else None


class GlassPlatform(SRTPlatform):
    """SGLang on ``torch.device("glass")``, with decode graphs and without Triton."""

    _enum = PlatformEnum.OOT
    device_name = NAME
    device_type = NAME
    capabilities = PlatformCapabilities(graph_capture=True)

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        # a breakable graph asks the CUDA runtime itself whether its stream captures
        server_args.disable_prefill_cuda_graph = True
        # SGLang fences its scheduler's writes on a forward's reads on CUDA alone
        os.environ["SGLANG_ENABLE_WAR_BARRIER"] = "1"
        # here, too: the launcher starts processes through SGLang's memory saver
        _save_memory()

    def get_device(self, device_id: int | None = None) -> str:
        return NAME if device_id is None else f"{NAME}:{device_id}"

    def set_device(self, device: Any) -> None:
        _card().set_device(device)

    def get_device_name(self, device_id: int = 0) -> str:
        return str(_card().get_device_name(device_id))

    def get_device_uuid(self, device_id: int = 0) -> str:
        return f"{NAME}-{device_id}"

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        return DeviceCapability(*_card().get_device_capability(device_id))

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(_card().mem_get_info(device_id)[1])

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        free, total = _card().mem_get_info(device)
        return float(total - free)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        free, total = _card().mem_get_info(device_id)
        return int(free), int(total)

    def empty_cache(self) -> None:
        _card().empty_cache()

    def synchronize(self) -> None:
        _card().synchronize()

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return True

    def get_default_attention_backend(self) -> str:
        return NAME

    def get_graph_runner_cls(self) -> type:
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
            DecodeCudaGraphRunner,
        )

        return DecodeCudaGraphRunner

    def get_full_graph_backend_cls(self) -> type[Any]:
        from sglang.srt.model_executor.runner_backend import full_cuda_graph_backend as backend

        # it makes a ``torch.cuda.CUDAGraph``, and takes all else from the device's module
        _patch(backend, "torch", _WithCard())
        return backend.FullCudaGraphBackend

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        return torch.device(NAME, local_rank)

    def get_torch_distributed_backend_str(self) -> str:
        return NAME if torch.distributed.is_backend_available(NAME) else "gloo"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def init_backend(self) -> None:
        """Prepare a process before it creates a model."""
        from harness.glass import attention, sharing

        _save_memory()
        attention.register()
        sharing.allow_in_payloads()
        exchange_by_card()
        start_without_work_left()


def _save_memory() -> None:
    # imported late: the module imports SGLang modules that ask for the platform
    from harness.glass import saver

    saver.install()


def exchange_by_card() -> None:
    """Launch our exchange of changes on the card in place of its Triton kernel."""
    from sglang_inflight.scheduler.update.changes import exchange_kernel

    width_of = {kind: width for width, kind in exchange_kernel._WIDTHS.items()}

    class Exchange:
        """Called as the kernel is: ``_exchange[(rows,)](table, TYPE, TILE)``."""

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def launch(table: torch.Tensor, kind: Any, tile: int) -> None:
                _card().launch_exchange(table[: grid[0]], width_of[kind])

            return launch

    _patch(exchange_kernel, "_exchange", Exchange())


def start_without_work_left() -> None:
    """Let the scheduler's stream begin where all work of the start is over.

    SGLang fills its pools on the default stream and reads them on the scheduler's, without an
    event. A card is done with that long before the first request, and no rule says so.
    """
    from sglang.srt.managers.scheduler import Scheduler

    run = Scheduler.run_event_loop

    def run_event_loop(scheduler: Scheduler) -> None:
        _card().synchronize()
        run(scheduler)

    _patch(Scheduler, "run_event_loop", run_event_loop)


class _WithCard:
    """Stands in for ``torch`` in SGLang's modules that name ``torch.cuda``."""

    @property
    def cuda(self) -> Any:
        return _card()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _card() -> Any:
    return torch.get_device_module(NAME)


def _patch(module: Any, name: str, value: object) -> None:
    setattr(module, name, value)
