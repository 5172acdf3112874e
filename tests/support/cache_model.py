"""A model of the prefix cache without a radix tree.

Entries are whole sequences with the version of each position's KV, by the generation under which
they are cached. The model evicts nothing, so a compared test must not fill the pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

Tokens = Sequence[int]


@dataclass
class CacheModel:
    """Prefixes that a request without a bound of its own may reuse."""

    epoch: int = 0
    # the oldest generation that may be reused
    floor: int = 0
    _is_bounded: bool = False
    _generations: list[int] = field(default_factory=lambda: [0])
    _entries: dict[int, list[tuple[list[int], list[str]]]] = field(default_factory=dict)

    def commit(self, oldest: int | None) -> None:
        """Begin an epoch. ``oldest``: the oldest age of prefixes that it keeps; None for all."""
        self.epoch += 1
        self._is_bounded = oldest is not None
        if oldest is not None:
            self.floor = max(self.floor, self.epoch - oldest)
            self._generations.append(self.epoch)

    def flush(self) -> None:
        self._entries = {}

    def insert(self, generation: int, tokens: Tokens, kv: Sequence[str]) -> list[str]:
        """Publish a sequence, and return the versions used for it from now on.

        An existing prefix keeps its KV.
        """
        known = self._known(generation, tokens)
        used = known + list(kv[len(known) : len(tokens)])
        self._entries.setdefault(generation, []).append((list(tokens), used))
        return used

    def look_up(self, tokens: Tokens) -> tuple[int, list[str]]:
        """Return the generation of a request for ``tokens``, and the versions of the KV it reuses.

        The last token is always computed, because its forward gives the next token.
        """
        best, longest = self._generations[-1] if self._is_bounded else self.floor, list[str]()
        for generation in sorted({best, *self._generations}, reverse=True):
            found = self._known(generation, tokens)[: len(tokens) - 1]
            if generation >= self.floor and len(found) > len(longest):
                best, longest = generation, found
        return best, longest

    def of_newest(self, tokens: Tokens) -> tuple[int, list[str]]:
        """Return the same for a request that recomputes too old KV."""
        return self.epoch, self._known(self.epoch, tokens)[: len(tokens) - 1]

    def _known(self, generation: int, tokens: Tokens) -> list[str]:
        longest: list[str] = []
        for entry, kv in self._entries.get(generation, []):
            pairs = zip(entry, tokens, strict=False)
            common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if common > len(longest):
                longest = kv[:common]
        return longest
