"""What the shadow holds, and which step of an update may come then.

    step      EMPTY    OPEN      SEALED
    open      OPEN     refused   refused
    stage     refused  OPEN      refused
    seal      refused  OPEN      refused
    voted     refused  SEALED    refused
    commit    refused  refused   EMPTY
    drop      EMPTY    EMPTY     EMPTY

EMPTY: the previous version, or nothing of worth. OPEN: what the staging thread has filled in so
far. SEALED: a complete update that was checked, for which this rank has voted.
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
    # the staging thread's, at the end of the job that a seal is
    VOTED = "voted"
    COMMIT = "commit"
    DROP = "drop"


# what is not in it is refused
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
    """Those in which ``step`` is not refused."""
    return [state for known, state in MOVES if known is step]
