"""Entry point of the group ``sglang.srt.plugins``: SGLang calls it in every process.

The module imports nothing of ours or SGLang's at its top: SGLang would log and swallow an import
error.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

# modules with a list ``HOOKS``
HOOK_LISTS = (
    "sglang_inflight.scheduler.hooks",
    "sglang_inflight.frontend.tokenizer_hooks",
    "sglang_inflight.frontend.engine.hooks",
    "sglang_inflight.frontend.workers.hooks",
    "sglang_inflight.redaction",
)


def every_hook() -> Iterator[tuple[str, Any, Any]]:
    """Yield the target, hook and kind of every hook."""
    for name in HOOK_LISTS:
        yield from importlib.import_module(name).HOOKS


def install() -> None:
    """Make our messages known, apply the patch series, register the hooks.

    SGLang loads plugins before it opens a socket or makes a scheduler. SGLang swallows every
    ``Exception`` of a plugin, so a failure here ends the process: no server starts half patched.
    Nothing is installed in a child of an inactive server. With
    ``SGLANG_INFLIGHT_UNSUPPORTED=off`` a failure leaves SGLang unpatched, and the server starts.
    """
    import logging

    logger = logging.getLogger(__name__)
    try:
        from sglang_inflight import inactive
        from sglang_inflight.settings import Settings

        if inactive.is_child_of_inactive():
            return
        settings = Settings.from_environment()
        try:
            _install()
        except (Exception, SystemExit) as error:
            if settings.unsupported != "off":
                raise
            logger.warning("%s. This server runs as SGLang ships it, without us.", error)
    except Exception as error:
        logger.critical("SGLang Inflight", exc_info=error)
        raise SystemExit(f"SGLang Inflight cannot be installed: {error!r}") from error


def _install() -> None:
    """Install. Every step that can fail comes before the first change to SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_inflight.livepatch import apply_series, expect_hook, load_series

    # first, because its refusal explains more than a failed import on another SGLang version
    load_series()
    hooks = [*every_hook()]
    from sglang_inflight import messages
    from sglang_inflight.frontend.engine import hooks as engine_hooks
    from sglang_inflight.nccl_errors import name_error_handling

    name_error_handling()
    messages.make_known()
    apply_series()
    engine_hooks.add_methods()
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)
        expect_hook(target)
