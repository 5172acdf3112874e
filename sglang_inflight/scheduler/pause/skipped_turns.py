"""Turns of a pipeline's microbatches that were held, and are still owed.

What a microbatch has prefilled is in ``last_mbs`` until its next turn, which takes it into the
batch that runs. Elsewhere SGLang does not look for it: between those two turns it takes the
results of one for a sign that the other is near. A turn that was held is not: so as long as a
microbatch waits for its turn, also when the others have had theirs again, ``last_mbs`` may have
requests that are in no other list.
"""

from __future__ import annotations


class SkippedTurns:
    """Only the scheduler's thread touches it."""

    def __init__(self) -> None:
        self._owed = 0

    def begin(self, *, held: bool, microbatches: int) -> None:
        """A turn begins, and launches nothing if it is ``held``. Microbatches take turns."""
        self._owed = microbatches if held else max(0, self._owed - 1)

    @property
    def pending(self) -> bool:
        return self._owed > 0
