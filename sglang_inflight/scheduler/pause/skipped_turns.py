"""Counts held turns of a pipeline's microbatches that are still owed.

A microbatch's prefilled requests stay in ``last_mbs`` until its next turn moves them into its
running batch. SGLang looks for them nowhere else, because that turn normally follows at once. A
held turn breaks this: requests may then be in ``last_mbs`` and in no other list. That lasts until
each microbatch has had its turn, even when the others have had theirs again.
"""

from __future__ import annotations


class SkippedTurns:
    """The number of owed turns. Only the scheduler's thread touches it."""

    def __init__(self) -> None:
        self._owed = 0

    def begin(self, *, held: bool, microbatches: int) -> None:
        """Count a turn. A ``held`` turn launches nothing, and makes every microbatch owed one."""
        self._owed = microbatches if held else max(0, self._owed - 1)

    @property
    def pending(self) -> bool:
        return self._owed > 0
