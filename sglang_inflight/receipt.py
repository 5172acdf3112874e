"""What the calls of updates answer with."""

from __future__ import annotations

from sglang_inflight.answer import Answer


class RankReceipt(Answer, frozen=True, kw_only=True):
    """Of one rank that has committed. Equal weights have equal digests, whichever way they came."""

    dp_rank: int
    tp_rank: int
    pp_rank: int
    success: bool = True
    message: str = ""
    digest: str


class Receipt(Answer, frozen=True, kw_only=True):
    """Proof of what is served now, rank by rank."""

    success: bool = True
    message: str
    weight_version: str
    base_version: str
    # commits and rollbacks so far
    epoch: int
    # the slowest rank's, over all calls of a session
    staged_s: float
    # the longest that any rank's loop was held by the commit
    stall_ms: float
    bytes: int
    tensors: int
    # requests that were sent back to the queue
    retracted: int
    ranks: tuple[RankReceipt, ...]


class StagedSoFar(Answer, frozen=True, kw_only=True):
    """What a session holds. Nothing of it is served: ``weight_version`` is what still is."""

    success: bool = True
    message: str
    weight_version: str
    staged_s: float
    bytes: int
    tensors: int


class Begun(Answer, frozen=True, kw_only=True):
    """A session is open, or its lease renewed."""

    success: bool = True
    message: str
    session_id: str
