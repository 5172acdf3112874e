"""Entry point of the group ``sglang.srt.plugins``: SGLang calls it in every process.

The module imports nothing of ours or SGLang's at its top: SGLang would log and swallow an import
error.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Container
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_inflight.hooking import Hook

# the core's modules that declare hooks (``hooking.py``)
HOOK_MODULES = (
    "sglang_inflight.frontend.aio",
    "sglang_inflight.frontend.control_calls",
    "sglang_inflight.frontend.engine.hooks",
    "sglang_inflight.frontend.http.endpoints",
    "sglang_inflight.frontend.requests.checks",
    "sglang_inflight.frontend.requests.doors",
    "sglang_inflight.frontend.requests.values",
    "sglang_inflight.frontend.shutdown",
    "sglang_inflight.frontend.spans",
    "sglang_inflight.frontend.tokenizer_hooks",
    "sglang_inflight.scheduler.beams",
    "sglang_inflight.scheduler.boundary",
    "sglang_inflight.scheduler.captures",
    "sglang_inflight.scheduler.collectives",
    "sglang_inflight.scheduler.controller",
    "sglang_inflight.scheduler.hold",
    "sglang_inflight.scheduler.outputs",
    "sglang_inflight.scheduler.retraction.aborted_output",
    "sglang_inflight.scheduler.retraction.penalties",
    "sglang_inflight.scheduler.retraction.prefilled_again",
    "sglang_inflight.scheduler.retraction.session_turns",
    "sglang_inflight.scheduler.slots",
    "sglang_inflight.scheduler.start",
    "sglang_inflight.scheduler.update.reservation",
    "sglang_inflight.scheduler.versions.kv_ages",
    "sglang_inflight.scheduler.versions.token_versions",
    "sglang_inflight.unsupported",
)

_is_installed = False


def is_installed() -> bool:
    """Return whether ``install`` has succeeded in this process."""
    return _is_installed


def hook_modules(*, without: Container[str] = ()) -> tuple[str, ...]:
    """Return every module that declares hooks: the core's, and those of extensions on or off.

    Leave out modules whose hooks wait for modules of SGLang's that need a library in ``without``.
    """
    from sglang_inflight.extension import all_extensions

    return (
        *HOOK_MODULES,
        *(
            module
            for extension in all_extensions()
            for module in (
                *extension.modules,
                *(() if extension.library in without else extension.late_modules.values()),
            )
        ),
    )


def every_hook() -> list[Hook]:
    """Return the hooks of all modules."""
    from sglang_inflight.hooking import hooks_of

    return hooks_of(hook_modules())


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
    global _is_installed
    from sglang_inflight.livepatch import apply_series, load_series

    # first, because its refusal explains more than a failed import on another SGLang version
    load_series()
    from sglang_inflight import joints, messages, unsupported
    from sglang_inflight.hooking import hooks_of
    from sglang_inflight.settings import extensions_on

    extensions = extensions_on()
    modules = [module for extension in extensions for module in extension.modules]
    hooks = hooks_of((*HOOK_MODULES, *modules))
    joints.compose(modules)
    from sglang_inflight.frontend.engine import hooks as engine_hooks
    from sglang_inflight.late_import import when_imported
    from sglang_inflight.nccl_errors import name_error_handling

    name_error_handling()
    messages.make_known(*(each for extension in extensions for each in extension.messages()))
    apply_series()
    engine_hooks.add_methods()
    _register(hooks)
    for name, begin in unsupported.OTHER_LAUNCHES.items():
        when_imported(name, begin)
    for extension in extensions:
        for name, module in extension.late_modules.items():
            if name in sys.modules:
                _register(hooks_of([module]))
            else:
                when_imported(name, functools.partial(_hook_late, module))
    _is_installed = True


def _register(hooks: list[Hook]) -> None:
    """Register hooks for SGLang, which applies them after the last plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_inflight.hooking import one_around_each
    from sglang_inflight.livepatch import expect_hook

    for target, hook, kind in one_around_each(hooks):
        HookRegistry.register(target, hook, kind)
        expect_hook(target)


def _hook_late(module: str, _: ModuleType) -> None:
    """Hook the functions of a module that SGLang has just imported."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_inflight.hooking import hooks_of

    _register(hooks_of([module]))
    HookRegistry.apply_hooks()
