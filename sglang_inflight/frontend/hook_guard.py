"""Limit hooks to servers with us; other servers stay as SGLang ships them.

A process may have loaded us and launch a server without us (``inactive.py``). The
hook's first argument tells the two apart: with us, a manager has a ``Frontend``, and its
communicators and engine lead to the manager.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

Hook = Callable[..., Any]


def replace_if_active(replacement: Hook) -> tuple[Hook, HookType]:
    """Call ``replacement`` instead of SGLang's function."""

    def stand_in(original: Hook, owner: Any, *args: Any, **kwargs: Any) -> Any:
        if has_frontend(owner):
            return replacement(owner, *args, **kwargs)
        return original(owner, *args, **kwargs)

    # porting compares this signature with SGLang's source
    own = inspect.signature(replacement).parameters.values()
    original = inspect.Parameter("original", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    stand_in.__signature__ = inspect.Signature([original, *own])  # type: ignore[attr-defined]
    stand_in.__name__ = stand_in.__qualname__ = replacement.__name__
    return stand_in, HookType.AROUND


def wrap_if_active(hook: Hook) -> tuple[Hook, HookType]:
    @functools.wraps(hook)
    def stand_in(original: Hook, owner: Any, *args: Any, **kwargs: Any) -> Any:
        if has_frontend(owner):
            return hook(original, owner, *args, **kwargs)
        return original(owner, *args, **kwargs)

    return stand_in, HookType.AROUND


def before_if_active(hook: Hook) -> tuple[Hook, HookType]:
    @functools.wraps(hook)
    def stand_in(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(owner, *args, **kwargs) if has_frontend(owner) else None

    return stand_in, HookType.BEFORE


def after_if_active(hook: Hook) -> tuple[Hook, HookType]:
    @functools.wraps(hook)
    def stand_in(result: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(result, owner, *args, **kwargs) if has_frontend(owner) else None

    return stand_in, HookType.AFTER


def has_frontend(owner: Any) -> bool:
    """Whether ``owner`` is, or belongs to, a manager with a ``Frontend``."""
    manager = getattr(owner, "tokenizer_manager", owner)
    return hasattr(manager, "inflight")
