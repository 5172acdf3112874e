"""Entry point of the group ``sglang.srt.plugins``: SGLang calls it in every process."""

from __future__ import annotations

from sglang_inflight import messages
from sglang_inflight.settings import Settings


def install() -> None:
    """Make our messages known, apply the patch series, register the hooks.

    SGLang loads plugins before it opens a socket or makes a scheduler, and logs and
    swallows what they raise, except ``SystemExit``. So whatever fails here raises one:
    a server never starts half patched.
    """
    Settings.from_environment()
    messages.make_known()
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_inflight.frontend import engine_hooks, tokenizer_hooks
    from sglang_inflight.livepatch import expect_hook, load_series
    from sglang_inflight.scheduler import hooks as scheduler_hooks

    load_series().apply()
    engine_hooks.add_methods()
    for target, hook, kind in (
        *scheduler_hooks.HOOKS,
        *tokenizer_hooks.HOOKS,
        *engine_hooks.HOOKS,
    ):
        HookRegistry.register(target, hook, kind)
        expect_hook(target)
