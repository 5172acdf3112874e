"""What the calls of pauses answer with."""

from __future__ import annotations

from sglang_inflight.answer import Answer
from sglang_inflight.receipt import Receipt
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


class NamelessGrant(Answer, frozen=True, kw_only=True):
    """SGLang's own pause, see ``frontend/sglangs_pause.py``: all requests have ended."""

    status: str = "ok"
    message: str = "Generation paused successfully."
    paused: bool = True
    mode: PauseMode = "abort"
    weight_version: str


class Release(Answer, frozen=True, kw_only=True):
    """A pause was let go of, or all were; ``paused`` where others still hold one."""

    status: str = "ok"
    message: str
    paused: bool


class RankMemory(Answer, frozen=True, kw_only=True):
    """What one rank gave back, or took again."""

    dp_rank: int
    tp_rank: int
    pp_rank: int
    # by kind of memory; "shadow" is the second copy of the weights
    bytes: dict[str, int]
    seconds: float


class MemoryMoved(Answer, frozen=True, kw_only=True):
    """Memory was given back by every rank, or taken again.

    ``paused`` where generation stands still after it, ``hollow`` where the weights are to be sent.
    """

    status: str = "ok"
    success: bool = True
    message: str
    paused: bool
    hollow: str | None = None
    ranks: tuple[RankMemory, ...] = ()


class WindowGrant(Answer, frozen=True, kw_only=True):
    """Nothing stands still, see ``frontend/transparent.py``: what is sent now goes live in flight.

    ``paused`` where there was a reason to stand still all the same.
    """

    status: str = "ok"
    message: str
    paused: bool
    mode: PauseMode
    transparent: bool = True
    weight_version: str


class WindowRelease(Answer, frozen=True, kw_only=True):
    """What was sent has gone live; no ``receipt`` where nothing was."""

    status: str = "ok"
    message: str
    paused: bool
    receipt: Receipt | None


class Deferred(Answer, frozen=True, kw_only=True):
    """Of a call that is made for nothing, until ``continue_generation`` does it."""

    success: bool = True
    message: str
