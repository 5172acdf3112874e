"""A model of the prefix cache without a radix tree.

Entries are whole sequences with the version of each position's KV. The model evicts nothing, so a
compared test must not fill the pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

Tokens = Sequence[int]


@dataclass
class CacheModel:
    """Prefixes reusable behind the current fence."""

    _entries: list[tuple[list[int], list[str]]] = field(default_factory=list)

    def forget(self) -> None:
        """Forget all entries, as at a fence or a flush."""
        self._entries = []

    def insert(self, tokens: Tokens, kv: Sequence[str]) -> list[str]:
        """Publish a sequence, and return the versions used for it from now on.

        An existing prefix keeps its KV.
        """
        known = self._known(tokens)
        used = known + list(kv[len(known) : len(tokens)])
        self._entries.append((list(tokens), used))
        return used

    def reusable(self, tokens: Tokens) -> list[str]:
        """Return the versions of the KV reused by a request for ``tokens``.

        The last token is always computed, because its forward gives the next token.
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
