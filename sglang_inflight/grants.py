"""Answers of pauses and of memory calls."""

from __future__ import annotations

from sglang_inflight.answer import Answer
from sglang_inflight.receipt import Receipt
from sglang_inflight.status import PauseMode


class RankGrant(Answer, frozen=True, kw_only=True):
    """Counts of one rank's requests at the pause."""

    dp_rank: int
    tp_rank: int
    pp_rank: int
    running: int
    waiting: int
    retracted: int
    aborted: int


class Grant(Answer, frozen=True, kw_only=True):
    """Every rank is paused. ``pause_id`` renews and releases the pause."""

    status: str = "ok"
    message: str = "Generation paused successfully."
    paused: bool = True
    mode: PauseMode | None
    pause_id: str
    weight_version: str
    ranks: tuple[RankGrant, ...]


class NamelessGrant(Answer, frozen=True, kw_only=True):
    """SGLang's own pause has ended all requests (``frontend/sglangs_pause.py``)."""

    status: str = "ok"
    message: str = "Generation paused successfully."
    paused: bool = True
    mode: PauseMode = "abort"
    weight_version: str


class Release(Answer, frozen=True, kw_only=True):
    """One pause or all were released. ``paused`` is true if another one is still held."""

    status: str = "ok"
    message: str
    paused: bool


class RankMemory(Answer, frozen=True, kw_only=True):
    """Memory released or resumed by one rank."""

    dp_rank: int
    tp_rank: int
    pp_rank: int
    # by kind of memory; "shadow" is the second copy of the weights
    bytes: dict[str, int]
    seconds: float


class MemoryMoved(Answer, frozen=True, kw_only=True):
    """Every rank released or resumed memory.

    ``paused`` is true if generation is paused afterwards. ``hollow`` says why weights must be sent
    first.
    """

    status: str = "ok"
    success: bool = True
    message: str
    paused: bool
    hollow: str | None = None
    ranks: tuple[RankMemory, ...] = ()


class WindowGrant(Answer, frozen=True, kw_only=True):
    """Transparent mode: generation goes on, and weights sent from here on go live in flight.

    ``paused`` is true if generation had to pause all the same (``frontend/transparent.py``).
    """

    status: str = "ok"
    message: str
    paused: bool
    mode: PauseMode
    transparent: bool = True
    weight_version: str


class WindowRelease(Answer, frozen=True, kw_only=True):
    """The end of a transparent pause. ``receipt`` is None if no weights were sent."""

    status: str = "ok"
    message: str
    paused: bool
    receipt: Receipt | None


class Deferred(Answer, frozen=True, kw_only=True):
    """Transparent mode recorded the call. ``continue_generation`` performs it."""

    success: bool = True
    message: str
