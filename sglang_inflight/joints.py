"""Joints: the places of the core at which extensions take part.

The core names a joint and calls its functions, and an extension's module joins a function to it by
a decorator. ``compose`` puts the functions of the installed modules in order, once, before SGLang
makes a process' objects. A joint without functions costs an empty loop. The core may have functions
of its own at a joint, by their order, between which those of extensions are put.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
P = TypeVar("P")

_joints: list[Joint[Any]] = []
# stands for the module of the core's functions, which always take part
_CORE = ""


class Joint(Generic[F]):
    """One place. ``F`` is the type of the functions that take part there.

    ``join`` is for a module's top level. After ``compose`` nothing changes any more, so any thread
    may iterate.
    """

    def __init__(self, name: str, core: Mapping[int, F] = MappingProxyType({})) -> None:
        self.name = name
        self._declared = {(order, _CORE): function for order, function in core.items()}
        _joints.append(self)
        self.compose(())

    def __iter__(self) -> Iterator[F]:
        return iter(self._functions)

    def join(self, *, order: int = 0) -> Callable[[F], F]:
        """Declare the decorated function a part of this joint, called after those of lower order.

        Raises ``ValueError`` for a second function of a module with the same order.
        """

        def declare(function: F) -> F:
            key = order, function.__module__
            if key in self._declared:
                raise ValueError(f"{function.__module__} joins {self.name} twice in order {order}")
            self._declared[key] = function
            return function

        return declare

    def compose(self, modules: Collection[str]) -> None:
        self._functions = tuple(
            function
            for (_, module), function in sorted(self._declared.items(), key=lambda each: each[0])
            if module == _CORE or module in modules
        )


class HasParts:
    """An object of the core beside which extensions have objects of their own, one of a class."""

    _parts: dict[type, object]

    def make_parts(self, made: Iterable[object]) -> None:
        """Keep what the functions at a joint have made."""
        self._parts = {type(part): part for part in made}

    def part(self, kind: type[P]) -> P:
        """Return an extension's object of the class ``kind``."""
        found = self._parts[kind]
        assert isinstance(found, kind)
        return found


def compose(modules: Collection[str]) -> None:
    """Let exactly the functions of ``modules``, which are imported, take part at every joint."""
    for joint in _joints:
        joint.compose(modules)
