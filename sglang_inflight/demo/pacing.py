"""How long the stories are, and when the next weights come."""

from __future__ import annotations

from dataclasses import dataclass

UPDATES = 3
# in tokens, of each version: enough to see how it writes
READING = 70
# how long an update may take, on a machine that is busy besides
UPDATE_S = 10.0
SHORTEST = 490


@dataclass(frozen=True)
class Pacing:
    """In tokens of the slowest story: its length, and how long each version is read before
    the next update begins."""

    tokens: int
    reading: int

    @classmethod
    def over(cls, tokens: int) -> Pacing:
        """Most of a story is left for the updates, which take time rather than tokens."""
        return cls(tokens, reading=min(READING, tokens // 7))

    @classmethod
    def at(cls, step_s: float, longest: int) -> Pacing:
        """Where a token takes ``step_s``. Updates must not outlast the stories."""
        updates = UPDATES * UPDATE_S / max(step_s, 1e-3)
        tokens = (UPDATES + 1) * READING + round(updates)
        return cls.over(min(longest, max(SHORTEST, tokens)))
