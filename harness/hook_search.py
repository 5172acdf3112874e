"""An index of the places in modules that hold a function to be hooked.

For each of our hooks, SGLang's hook registry searches every name of every module, most of the
remaining time of a start without imports. The index finds the same names. It is built with the
imports, and completed with modules imported later.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import FunctionType, ModuleType
from typing import Any

from sglang.srt.plugins import hook_registry


class HookSearch:
    def __init__(self) -> None:
        self._modules: set[ModuleType] = set()
        self._count = 0
        self._places: defaultdict[int, list[tuple[ModuleType, str]]] = defaultdict(list)

    def complete(self) -> None:
        """Add new modules, if their number has grown."""
        if len(sys.modules) == self._count:
            return
        self._count = len(sys.modules)
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and module not in self._modules:
                self._modules.add(module)
                for name, value in list(vars(module).items()):
                    # not isinstance: it would make a lazy proxy import its object
                    if issubclass(type(value), (FunctionType, type)):
                        self._places[id(value)].append((module, name))

    def replace(self, original: Any, wrapped: Any, source: Any) -> int:
        """Replace ``_propagate_patch`` of the hook registry, with the same return value."""
        self.complete()
        replaced = 0
        for module, name in self._places[id(original)]:
            # the id may belong to a deleted object
            if module is not source and vars(module).get(name) is original:
                setattr(module, name, wrapped)
                self._places[id(wrapped)].append((module, name))
                replaced += 1
        return replaced

    def install(self) -> None:
        self.complete()
        replace: Any = self.replace
        hook_registry._propagate_patch = replace
