"""Length of the stories, and times of the updates."""

from __future__ import annotations

from dataclasses import dataclass

UPDATES = 4
# tokens of each version: enough to show its style
READING = 70
# longest update, on a busy machine
UPDATE_S = 10.0
SHORTEST = 630


@dataclass(frozen=True)
class Pacing:
    """Tokens of the slowest story: its length, and each version's share before the next update
    begins."""

    tokens: int
    reading: int

    @classmethod
    def over(cls, tokens: int) -> Pacing:
        """Leave most of a story for the updates: an update takes time, not tokens."""
        return cls(tokens, reading=min(READING, tokens // (2 * UPDATES + 1)))

    @classmethod
    def at(cls, step_s: float, longest: int) -> Pacing:
        """Return the pacing for ``step_s`` seconds a token. Stories must outlast updates."""
        updates = UPDATES * UPDATE_S / max(step_s, 1e-3)
        tokens = (UPDATES + 1) * READING + round(updates)
        return cls.over(min(longest, max(SHORTEST, tokens)))
