"""Find the modules that hold a hooked function, by one look at all modules.

For each hook SGLang's ``hook_registry._propagate_patch`` looks at every name of every module. With
our hooks this takes more than half as long as a process's imports, in each process of a server. An
index finds the same places, and is made once for all hooks.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any


class Places:
    """Names in modules, by the function or class that they hold.

    Not safe for threads: SGLang applies hooks in a process's main thread, before it starts others.
    """

    def __init__(self, search: Callable[[Any, Any, Any], int]) -> None:
        """``search`` is the registry's own, for what the index leaves out."""
        self._search = search
        # all modules of the last look
        self._seen: list[Any] = []
        self._indexed: set[ModuleType] = set()
        # modules in the midst of their import, which still get names
        self._growing: list[ModuleType] = []
        self._places: defaultdict[int, list[tuple[ModuleType, str]]] = defaultdict(list)

    def complete(self) -> None:
        """Index modules imported since the last look."""
        now = list(sys.modules.values())
        if now != self._seen:
            self._seen = now
            self._index(now)

    def _index(self, modules: Iterable[Any]) -> None:
        self._growing = []
        for module in modules:
            if not isinstance(module, ModuleType) or module in self._indexed:
                continue
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                self._growing.append(module)
                continue
            self._indexed.add(module)
            for name, value in list(vars(module).items()):
                # not isinstance: it would make a lazy proxy import its object
                if issubclass(type(value), (FunctionType, type)):
                    self._places[id(value)].append((module, name))

    def replace(self, original: Any, wrapped: Any, source: Any) -> int:
        """Put ``wrapped`` in place of ``original`` in all modules except ``source``.

        Return the number of places, like ``_propagate_patch``.
        """
        if not issubclass(type(original), (FunctionType, type)):
            return self._search(original, wrapped, source)
        self.complete()
        growing = [(module, name) for module in self._growing for name in list(vars(module))]
        replaced = 0
        for module, name in [*self._places[id(original)], *growing]:
            # the id may belong to a deleted object
            if module is not source and vars(module).get(name) is original:
                # SGLang's search, too, leaves a name that its module keeps
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(module, name, wrapped)
                    self._places[id(wrapped)].append((module, name))
                    replaced += 1
        return replaced


@contextlib.contextmanager
def looking_once() -> Iterator[None]:
    """Give the registry an index for the block, which applies hooks.

    An index ends with its block, because modules may get other names afterwards.
    """
    from sglang.srt.plugins import hook_registry

    search = hook_registry._propagate_patch
    if isinstance(getattr(search, "__self__", None), Places):
        # within another block, or in a process that keeps an index, as those of tests do
        yield
        return
    replace: Any = Places(search).replace
    hook_registry._propagate_patch = replace
    try:
        yield
    finally:
        hook_registry._propagate_patch = search
