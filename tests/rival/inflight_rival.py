"""A plugin that replaces a patched function, so that the server must not start."""

from __future__ import annotations

from typing import Any


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.scheduler.Scheduler.pause_generation"
    HookRegistry.register(target, pause_generation, HookType.REPLACE)


def pause_generation(scheduler: Any, request: Any) -> None:
    """Pause nothing."""
