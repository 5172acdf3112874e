"""Add our methods to ``sglang.Engine``, and let threads share its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_inflight.frontend.engine.methods import METHODS
from sglang_inflight.frontend.engine.shared_loop import share
from sglang_inflight.hooking import AROUND, BEFORE, ENGINE, hook, hook_each, with_us
from sglang_inflight.vocabulary.contracts import FIELDS, fold_into_sampling, given_in

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedEngine

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
    if not with_us(engine):
        return vars(engine).get("loop", home)
    share(home)
    return home


def _adopt(engine: PatchedEngine, loop: asyncio.AbstractEventLoop) -> None:
    vars(engine)["loop"] = loop


@hook(f"{ENGINE}.shutdown", BEFORE)
def end_what_waits(engine: PatchedEngine) -> None:
    """Fail waiting calls before the ranks are ended: no rank would answer."""
    frontend = getattr(getattr(engine, "tokenizer_manager", None), "inflight", None)
    if frontend is not None:
        frontend.lifetime.end("the engine was shut down")


@hook(f"{ENGINE}.generate", AROUND, when=with_us)
@hook(f"{ENGINE}.async_generate", AROUND, when=with_us)
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


hook_each(
    __name__,
    {
        f"{ENGINE}.{method.name}": method.instead
        for method in METHODS.values()
        if method.is_sglangs and method.name not in _NEW
    },
    AROUND,
)
