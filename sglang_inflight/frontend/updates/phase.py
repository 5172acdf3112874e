"""Phases of an update, as a pure transition table.

    phase       event    next
    OPEN        STAGE    OPEN          a call brings tensors
    OPEN        SEAL     SEALING       every rank is asked to check the whole, and to vote
    SEALING     VOTE     SEALED        all of them voted for it
    SEALED      COMMIT   COMMITTING    the commit is sent, and cannot be called back
    COMMITTING  END      ENDED         every rank has answered it, or is silent
    OPEN        DROP     DROPPED       a call failed, its caller left, its lease ran out, or
    SEALING     DROP     DROPPED       somebody aborted or replaced it
    SEALED      DROP     DROPPED

Other transitions cannot happen. So a commit is sent only after all votes, an update takes no
tensors after its vote was asked for, and an update is committed or dropped, never both.
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    OPEN = "open"
    SEALING = "sealing"
    SEALED = "sealed"
    COMMITTING = "committing"
    ENDED = "ended"
    DROPPED = "dropped"


class Event(enum.Enum):
    STAGE = "stage"
    SEAL = "seal"
    VOTE = "vote"
    COMMIT = "commit"
    END = "end"
    DROP = "drop"


TABLE: dict[tuple[Phase, Event], Phase] = {
    (Phase.OPEN, Event.STAGE): Phase.OPEN,
    (Phase.OPEN, Event.SEAL): Phase.SEALING,
    (Phase.SEALING, Event.VOTE): Phase.SEALED,
    (Phase.SEALED, Event.COMMIT): Phase.COMMITTING,
    (Phase.COMMITTING, Event.END): Phase.ENDED,
    (Phase.OPEN, Event.DROP): Phase.DROPPED,
    (Phase.SEALING, Event.DROP): Phase.DROPPED,
    (Phase.SEALED, Event.DROP): Phase.DROPPED,
}


def follow(phase: Phase, event: Event) -> Phase | None:
    """Return the next phase, or None if ``event`` cannot happen in ``phase``."""
    return TABLE.get((phase, event))
