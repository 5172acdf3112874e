"""Answers of update calls."""

from __future__ import annotations

from sglang_inflight.answer import Answer


class RankReceipt(Answer, frozen=True, kw_only=True):
    """One rank's commit. Equal weights have equal digests, whatever their source."""

    dp_rank: int
    tp_rank: int
    pp_rank: int
    success: bool = True
    message: str = ""
    digest: str


class Receipt(Answer, frozen=True, kw_only=True):
    """Proof of the served weights, rank by rank."""

    success: bool = True
    message: str
    weight_version: str
    base_version: str
    # commits and rollbacks so far
    epoch: int
    # the slowest rank's time, summed over the calls of a session
    staged_s: float
    # longest time that the commit held a rank's loop
    stall_ms: float
    bytes: int
    tensors: int
    # requests sent back to the queue
    retracted: int
    ranks: tuple[RankReceipt, ...]


class StagedSoFar(Answer, frozen=True, kw_only=True):
    """A session's staged tensors, not served yet. ``weight_version`` is the served version."""

    success: bool = True
    message: str
    weight_version: str
    staged_s: float
    bytes: int
    tensors: int


class Begun(Answer, frozen=True, kw_only=True):
    """A session was opened, or its lease was renewed."""

    success: bool = True
    message: str
    session_id: str
