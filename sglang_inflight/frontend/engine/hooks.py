"""Add our methods to ``sglang.Engine``, and let threads share its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_inflight.frontend.engine.methods import METHODS
from sglang_inflight.frontend.engine.shared_loop import share
from sglang_inflight.frontend.hook_guard import has_frontend, wrap_if_active
from sglang_inflight.unsupported import ask_in_a_launch, launch
from sglang_inflight.vocabulary.contracts import FIELDS, fold_into_sampling, given_in

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedEngine

_ENGINE = "sglang.srt.entrypoints.engine.Engine"
# calls of SGLang's that its Engine has no method for
_NEW = ("pause_generation", "continue_generation")


def add_methods() -> None:
    """Add our new methods to ``Engine``. Runs before the hooks are applied."""
    from sglang.srt.entrypoints.engine import Engine

    Engine.loop = property(_home, _adopt)  # type: ignore[assignment]
    for method in METHODS.values():
        setattr(Engine, method.asynchronous.__name__, method.asynchronous)
        upstreams = getattr(Engine, method.name, None)
        if upstreams is None:
            setattr(Engine, method.name, method.waiting)
        else:
            # a hook keeps the signature and docstring of the replaced method: set ours there
            upstreams.__signature__ = method.waiting.__signature__  # type: ignore[attr-defined]
            upstreams.__doc__ = method.waiting.__doc__


def _home(engine: PatchedEngine) -> asyncio.AbstractEventLoop:
    """Return the engine's event loop: after the first use, the loop that receives its answers.

    SGLang's ``loop`` is the current loop at the engine's construction. An engine made before
    ``asyncio.run``, and first used within, lives on the loop of ``asyncio.run``.
    """
    home = getattr(engine.tokenizer_manager, "event_loop", None) or vars(engine).get("loop")
    if home is None:
        raise AttributeError("this engine was not fully constructed, and has no event loop")
    if not has_frontend(engine):
        return vars(engine).get("loop", home)
    share(home)
    return home


def _adopt(engine: PatchedEngine, loop: asyncio.AbstractEventLoop) -> None:
    vars(engine)["loop"] = loop


def end_what_waits(engine: PatchedEngine) -> None:
    """Fail waiting calls before the ranks are ended: no rank would answer."""
    frontend = getattr(getattr(engine, "tokenizer_manager", None), "inflight", None)
    if frontend is not None:
        frontend.lifetime.end("the engine was shut down")


def generate(
    upstreams: Callable[..., Any],
    engine: PatchedEngine,
    prompt: Any = None,
    sampling_params: Any = None,
    *args: Any,
    **named: Any,
) -> Any:
    """Take a version contract as keyword arguments, with the names that it has in a body."""
    given = {name: named.pop(name) for name in FIELDS if name in named}
    folded = fold_into_sampling(given_in(given), sampling_params)
    return upstreams(engine, prompt, folded, *args, **named)


HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    (f"{_ENGINE}._launch_subprocesses", launch, HookType.AROUND),
    # SGLang calls this once, after loading plugins and before starting processes
    (
        "sglang.srt.parser.template_detection.resolve_auto_parsers",
        ask_in_a_launch,
        HookType.BEFORE,
    ),
    *((f"{_ENGINE}.{name}", *wrap_if_active(generate)) for name in ("generate", "async_generate")),
    (f"{_ENGINE}.shutdown", end_what_waits, HookType.BEFORE),
    *(
        (f"{_ENGINE}.{method.name}", method.instead, HookType.AROUND)
        for method in METHODS.values()
        if method.is_sglangs and method.name not in _NEW
    ),
]
