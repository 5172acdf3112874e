"""What the prefix cache must give, said again without a radix tree.

Entries are whole sequences with the version of each position's KV. Nothing is evicted here,
so a test that compares with it must not fill the pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

Tokens = Sequence[int]


@dataclass
class CacheModel:
    """The prefixes that requests of the current fence may reuse."""

    _entries: list[tuple[list[int], list[str]]] = field(default_factory=list)

    def forget(self) -> None:
        """A fence was raised, or the cache was flushed."""
        self._entries = []

    def insert(self, tokens: Tokens, kv: Sequence[str]) -> list[str]:
        """Publish a sequence; returns the versions in use for it from now on.

        Of a prefix that is there already the KV that is there is used.
        """
        known = self._known(tokens)
        used = known + list(kv[len(known) : len(tokens)])
        self._entries.append((list(tokens), used))
        return used

    def reusable(self, tokens: Tokens) -> list[str]:
        """The versions of the KV that a request for ``tokens`` starts with.

        The last token is always computed, because its forward gives the next one.
        """
        return self._known(tokens)[: len(tokens) - 1]

    def _known(self, tokens: Tokens) -> list[str]:
        longest: list[str] = []
        for entry, kv in self._entries:
            pairs = zip(entry, tokens, strict=False)
            common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if common > len(longest):
                longest = kv[:common]
        return longest
