"""Install our functions through SGLang's ``HookRegistry``, and verify that they run.

The registry applies all plugins' hooks after the last plugin ran, and only logs failures. Of two
REPLACE hooks on one function the later one wins, even another plugin's. So we wrap
``HookRegistry.apply_hooks`` and verify afterwards: the function at each target must really call
ours. We follow the registry's wrappers through closures. A wrapper's ``__wrapped__`` and copied
attributes prove nothing: a rival's wrapper carries ours there without calling it.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from types import FunctionType
from typing import Any

from sglang_inflight.livepatch.places import looking_once

logger = logging.getLogger(__name__)


class PatchRefused(SystemExit):
    """The series cannot be applied as a whole: install the right SGLang, or drop a plugin.

    A ``SystemExit``: SGLang swallows every ``Exception`` of a plugin, and would start half
    patched.
    """

    def __init__(
        self,
        reason: str,
        *,
        found: str,
        patch: str | None = None,
        function: str | None = None,
    ) -> None:
        self.reason = reason
        self.found = found
        self.patch = patch
        self.function = function
        where = ", ".join(part for part in (patch, function) if part)
        super().__init__(
            f"sglang-inflight refuses to start on {found}: {where + ': ' if where else ''}{reason}"
        )


@dataclass(frozen=True)
class Replacement:
    """A patched function for ``target``, an attribute of ``owner``.

    ``function`` is None in a fork: nothing is registered, but a rival REPLACE would still remove
    the patch.
    """

    target: str
    owner: Any
    function: Callable[..., Any] | None
    patches: tuple[str, ...]
    found: str

    def refused(self, reason: str) -> PatchRefused:
        return PatchRefused(
            reason, found=self.found, patch=", ".join(self.patches), function=self.target
        )


_replacements: dict[str, Replacement] = {}
_expected: dict[str, Callable[..., Any] | None] = {}


def callable_of(built: Any) -> Callable[..., Any] | None:
    """Return a function for the registry, or None. The registry re-wraps class methods itself."""
    if isinstance(built, staticmethod | classmethod):
        return built.__func__
    return built if callable(built) and not isinstance(built, type) else None


def install(replacements: list[Replacement]) -> None:
    """Register all replacements or none.

    The registry's wrapper is a plain function returning our coroutine or asynchronous generator,
    so ``await`` and ``async for`` work. Only ``inspect.iscoroutinefunction`` and its kin return
    false for the wrapper.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for replacement in replacements:
        _refuse_rivals(replacement)
    for replacement in replacements:
        _replacements[replacement.target] = replacement
        if replacement.function is not None:
            HookRegistry.register(replacement.target, replacement.function, HookType.REPLACE)
    _verify_after(HookRegistry)


def expect_hook(target: str, hook: Callable[..., Any] | None = None) -> None:
    """Refuse to start unless the registry has hooked ``target``, and with ``hook`` if given."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    _expected[target] = hook
    _verify_after(HookRegistry)


def is_fork() -> bool:
    """Return whether the installed SGLang's files are patched. Valid after ``install``."""
    return any(replacement.function is None for replacement in _replacements.values())


def verify_hooks() -> None:
    """Raise ``PatchRefused`` unless every function and hook of ours is called."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    for replacement in _replacements.values():
        _refuse_rivals(replacement)
        if not _in_place(replacement, HookRegistry):
            raise replacement.refused("is not in place after SGLang applied all plugins' hooks")
    for target, hook in _expected.items():
        if target not in HookRegistry._patched or not (hook is None or _runs(target, hook)):
            raise PatchRefused(
                "SGLang did not apply the hook; its log says why",
                found=f"sglang {version('sglang')}",
                function=target,
            )


def forget() -> None:
    """Forget every function and hook of ours. For tests, beside ``HookRegistry.reset``."""
    _replacements.clear()
    _expected.clear()


def _verify_after(registry: Any) -> None:
    original = registry.__dict__["apply_hooks"].__func__
    if getattr(original, "_verifies_inflight", False):
        return

    @functools.wraps(original)
    def apply_hooks(cls: Any) -> None:
        with looking_once():
            original(cls)
        try:
            verify_hooks()
        except PatchRefused as refusal:
            # logged here, too: a thread, or the parent of a rank, drops a SystemExit's message
            logger.critical("%s", refusal)
            raise

    apply_hooks._verifies_inflight = True  # type: ignore[attr-defined]
    registry.apply_hooks = classmethod(apply_hooks)


def _refuse_rivals(replacement: Replacement) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = replacement.target
    for other, hooks in HookRegistry._hooks.items():
        if other != target and not target.startswith(other + "."):
            continue
        for hook_type, hook, source in hooks:
            if hook_type is HookType.REPLACE and hook is not replacement.function:
                plugin = f"plugin '{source.plugin_name}'" if source else "something else"
                raise replacement.refused(f"{plugin} replaces {other}")


def _in_place(replacement: Replacement, registry: Any) -> bool:
    owner, _, name = replacement.target.rpartition(".")
    if _resolve(owner) is not replacement.owner:
        return False
    if replacement.function is None:
        return name in vars(replacement.owner)
    return replacement.target in registry._patched and _runs(
        replacement.target, replacement.function
    )


def _runs(target: str, wanted: Callable[..., Any]) -> bool:
    from sglang.srt.plugins import hook_registry

    owner, _, name = target.rpartition(".")
    pending = [vars(_resolve(owner)).get(name)]
    while pending:
        found = pending.pop()
        if found is wanted:
            return True
        if isinstance(found, staticmethod | classmethod):
            pending.append(found.__func__)
        elif isinstance(found, FunctionType) and found.__globals__ is vars(hook_registry):
            pending += [cell.cell_contents for cell in found.__closure__ or ()]
    return False


def _resolve(path: str) -> Any:
    return pkgutil.resolve_name(path)
