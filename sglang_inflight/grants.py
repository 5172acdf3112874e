"""What the calls of pauses answer with."""

from __future__ import annotations

from sglang_inflight.answer import Answer
from sglang_inflight.status import PauseMode


class RankGrant(Answer, frozen=True, kw_only=True):
    """What the pause did with the requests of one rank."""

    dp_rank: int
    tp_rank: int
    pp_rank: int
    running: int
    waiting: int
    retracted: int
    aborted: int


class Grant(Answer, frozen=True, kw_only=True):
    """Every rank stands still. ``pause_id`` renews the pause, and lets go of it."""

    status: str = "ok"
    message: str = "Generation paused successfully."
    paused: bool = True
    mode: PauseMode | None
    pause_id: str
    weight_version: str
    ranks: tuple[RankGrant, ...]


class Release(Answer, frozen=True, kw_only=True):
    """A pause was let go of, or all were; ``paused`` where others still hold one."""

    status: str = "ok"
    message: str
    paused: bool
