"""Run a callback on a module, now or right after its import.

A server imports SGLang's HTTP app before it makes a manager. An ``Engine`` needs no app, and
importing one is slow. Ray Serve serves the app with an engine, and imports the app after the
engine was made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Waiting(MetaPathFinder, Loader):
    """Find the module as Python does, and call ``then`` once the module has run.

    Any thread may import the module. Python's module lock lets one thread run the module, and the
    others wait for the end of ``then``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loader: Loader | None = None
        self.then: Callable[[ModuleType], None] | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self.then is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        then, self.then = self.then, None
        if then is not None:
            then(module)


_waiting: dict[str, _Waiting] = {}


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with the module ``name`` now, or right after its import.

    A later ``then`` for the same module replaces a waiting one: SGLang's process globals belong to
    the newest engine.
    """
    if (module := sys.modules.get(name)) is not None:
        then(module)
        return
    if name not in _waiting:
        _waiting[name] = _Waiting(name)
        sys.meta_path.insert(0, _waiting[name])
    _waiting[name].then = then
