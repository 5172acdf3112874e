"""Where modules hold what a hook replaces, found in an index.

SGLang's hook registry looks through every name of every module for each of our hooks, which
is most of what is left of a start without imports. The index gives the same names: it is
made where the imports are, and completed with the modules that came since.
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
        """Take in the modules that are new, of which there are none where there are no more."""
        if len(sys.modules) == self._count:
            return
        self._count = len(sys.modules)
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and module not in self._modules:
                self._modules.add(module)
                for name, value in list(vars(module).items()):
                    # not isinstance, for which a proxy imports what it stands for
                    if issubclass(type(value), (FunctionType, type)):
                        self._places[id(value)].append((module, name))

    def replace(self, original: Any, wrapped: Any, source: Any) -> int:
        """``_propagate_patch`` of the hook registry, and what it returns."""
        self.complete()
        replaced = 0
        for module, name in self._places[id(original)]:
            # an id can be that of something that is gone
            if module is not source and vars(module).get(name) is original:
                setattr(module, name, wrapped)
                self._places[id(wrapped)].append((module, name))
                replaced += 1
        return replaced

    def install(self) -> None:
        self.complete()
        hook_registry._propagate_patch = self.replace
