"""The states of the shadow, and the steps of an update allowed in each.

    step      EMPTY    OPEN      SEALED
    open      OPEN     refused   refused
    stage     refused  OPEN      refused
    seal      refused  OPEN      refused
    voted     refused  SEALED    refused
    commit    refused  refused   EMPTY
    drop      EMPTY    EMPTY     EMPTY

EMPTY: the previous version, or nothing of use. OPEN: an update as far as it is filled. SEALED: a
complete and checked update with this rank's vote.
"""

from __future__ import annotations

import enum


class StagingState(enum.Enum):
    EMPTY = "empty"
    OPEN = "open"
    SEALED = "sealed"


class Step(enum.Enum):
    OPEN = "open"
    STAGE = "stage"
    SEAL = "seal"
    # by the staging thread, at the end of the seal's job
    VOTED = "voted"
    COMMIT = "commit"
    DROP = "drop"


# a step not listed here is refused
MOVES: dict[tuple[Step, StagingState], StagingState] = {
    (Step.OPEN, StagingState.EMPTY): StagingState.OPEN,
    (Step.STAGE, StagingState.OPEN): StagingState.OPEN,
    (Step.SEAL, StagingState.OPEN): StagingState.OPEN,
    (Step.VOTED, StagingState.OPEN): StagingState.SEALED,
    (Step.COMMIT, StagingState.SEALED): StagingState.EMPTY,
    (Step.DROP, StagingState.EMPTY): StagingState.EMPTY,
    (Step.DROP, StagingState.OPEN): StagingState.EMPTY,
    (Step.DROP, StagingState.SEALED): StagingState.EMPTY,
}


def states_for(step: Step) -> list[StagingState]:
    """Return the states that allow ``step``."""
    return [state for known, state in MOVES if known is step]
