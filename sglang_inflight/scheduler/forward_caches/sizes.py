"""Measures what shows at little cost that a forward has set an attribute."""

from __future__ import annotations

import operator
from itertools import compress
from typing import Any

from torch import nn

from sglang_inflight.scheduler.forward_caches.values import is_empty
from sglang_inflight.scheduler.update.attributes import modules_of, namespaces_of, values_in


class Sizes:
    """The number of attributes in each namespace, and the attributes without a value.

    Each commit compares them, for thousands of namespaces. So C functions do it in one go.
    """

    def __init__(self, model: nn.Module, judged: set[tuple[int, str]]) -> None:
        """Attributes that were ``judged`` may get a value."""
        self.namespaces: list[dict[str, Any]] = []
        # path and module of each namespace
        self.owners: list[tuple[str, nn.Module]] = []
        seen: set[int] = set()
        unset: list[tuple[int, str, Any]] = []
        containers: list[tuple[int, str, Any]] = []
        for path, module in modules_of(model):
            for _, namespace in namespaces_of(module):
                if id(namespace) in seen:
                    continue
                seen.add(id(namespace))
                at = len(self.namespaces)
                self.namespaces.append(namespace)
                self.owners.append((path, module))
                for name, value in values_in(namespace):
                    if is_empty(value) and (id(namespace), name) not in judged:
                        (unset if value is None else containers).append((at, name, value))
        # most modules have no buffers or no modules: truth costs less than a length
        self._empty_at = [at for at, found in enumerate(self.namespaces) if not found]
        self._empty = [self.namespaces[at] for at in self._empty_at]
        self._filled_at = [at for at, found in enumerate(self.namespaces) if found]
        self._filled = [self.namespaces[at] for at in self._filled_at]
        self._lengths = list(map(len, self._filled))
        self._place = {id(found): place for place, found in enumerate(self._filled)}
        self._holders = [self.namespaces[at] for at, _, _ in unset]
        self._names = [name for _, name, _ in unset]
        self._unset_at = [at for at, _, _ in unset]
        self._containers = [value for _, _, value in containers]
        self._containers_at = [at for at, _, _ in containers]

    def find_grown(self) -> list[int]:
        """Return the places of the namespaces with another number of attributes, or new values."""
        found: set[int] = set()
        lengths = list(map(len, self._filled))
        if lengths != self._lengths:
            found.update(compress(self._filled_at, map(operator.ne, lengths, self._lengths)))
        if any(self._empty):
            found.update(compress(self._empty_at, self._empty))
        values = list(map(dict.get, self._holders, self._names))
        if values.count(None) != len(values):
            found.update(at for at, v in zip(self._unset_at, values, strict=True) if v is not None)
        if any(self._containers):
            found.update(compress(self._containers_at, self._containers))
        return sorted(found)

    def follow(self, namespace: dict[str, Any]) -> None:
        """Take the present number of attributes of a known ``namespace`` for its usual one."""
        place = self._place.get(id(namespace))
        if place is not None:
            self._lengths[place] = len(namespace)
