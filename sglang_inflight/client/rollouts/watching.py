"""A watcher of the rollouts of a fleet, for a program that counts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# how a rollout ends. "left": its caller did not wait for the end
End = Literal["whole", "refused", "lost", "left"]
# why a rollout leaves a server
Why = Literal["drained", "busy", "unreachable", "failed"]


@dataclass(frozen=True)
class Move:
    """A rollout with tokens that has gone on at another server."""

    source: str
    target: str
    why: Why
    # what the source said, or how its stream ended
    said: str
    # the output's tokens at the move
    tokens: int
    # from the end at the source to the first new token of the target
    seconds: float


class Watcher:
    """Sees the rollouts, on their event loop. This one does nothing."""

    def begins(self) -> None:
        """See a rollout begin."""

    def moved(self, move: Move) -> None:
        """See a rollout go on at another server."""

    def ends(self, how: End) -> None:
        """See the end of a rollout."""
