"""Entry point of the group ``sglang.srt.plugins``: SGLang calls it in every process.

It imports nothing of ours or SGLang's at its top, because SGLang would log and swallow
what that raises too.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

# modules, each with its ``HOOKS``
HOOK_LISTS = (
    "sglang_inflight.scheduler.hooks",
    "sglang_inflight.frontend.tokenizer_hooks",
    "sglang_inflight.frontend.engine.hooks",
)


def every_hook() -> Iterator[tuple[str, Any, Any]]:
    """Target, hook and kind."""
    for name in HOOK_LISTS:
        yield from importlib.import_module(name).HOOKS


def install() -> None:
    """Make our messages known, apply the patch series, register the hooks.

    SGLang loads plugins before it opens a socket or makes a scheduler. It swallows every
    ``Exception`` of a plugin and starts without it, so what fails here ends the process:
    a server never starts half patched.
    """
    try:
        _install()
    except Exception as error:
        import logging

        logging.getLogger(__name__).critical("SGLang Inflight", exc_info=error)
        raise SystemExit(f"SGLang Inflight cannot be installed: {error!r}") from error


def _install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_inflight import messages
    from sglang_inflight.frontend.engine import hooks as engine_hooks
    from sglang_inflight.livepatch import apply_series, expect_hook
    from sglang_inflight.settings import Settings

    hooks = [*every_hook()]
    Settings.from_environment()
    messages.make_known()
    apply_series()
    engine_hooks.add_methods()
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)
        expect_hook(target)
