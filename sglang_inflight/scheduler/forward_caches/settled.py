"""Notes what a search has looked at, so that the next one looks at what has changed since."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, Generic, TypeVar

from sglang_inflight.scheduler.update.rate import paced

Slot = TypeVar("Slot")
Key = tuple[int, str]


class Settled(Generic[Slot]):
    """The attributes of a model that hold nothing new while they are the same objects.

    A model has some ten thousand namespaces, and nearly all are as they were. So C functions
    compare the addresses of all values in one go. An address shows an object while that object
    lives: settled values are held here, and are numbers, strings, and what loading made. A tensor
    that a forward made is never held, because it would take memory beside its successor.
    """

    def __init__(self, namespaces: list[dict[str, Any]]) -> None:
        """Note ``namespaces``, before the search that looks at their values."""
        self._namespaces = namespaces
        self._addresses = list(map(_addresses, paced(namespaces)))
        self._names = list(map(tuple, paced(namespaces)))
        self._held: list[Any] = []
        # a search looks at these each time
        self.others: list[Slot] = []

    def hold(self, value: Any) -> None:
        """Note that ``value`` is settled."""
        self._held.append(value)

    def is_as_before(self, judged: Container[Key]) -> bool:
        """Return whether all attributes are the same objects, besides those ``judged``."""
        for at, namespace in enumerate(paced(self._namespaces)):
            if _addresses(namespace) == self._addresses[at]:
                continue
            names = tuple(namespace)
            before = zip(self._names[at], self._addresses[at], strict=True)
            now = zip(names, map(id, map(namespace.get, names)), strict=True)
            if _without(before, namespace, judged) != _without(now, namespace, judged):
                return False
        return True


def _addresses(namespace: dict[str, Any]) -> tuple[int, ...]:
    # a tuple first: a forward may set an attribute meanwhile
    return tuple(map(id, tuple(namespace.values())))


def _without(
    found: Iterable[tuple[str, int]], namespace: dict[str, Any], judged: Container[Key]
) -> dict[str, int]:
    return {name: address for name, address in found if (id(namespace), name) not in judged}
