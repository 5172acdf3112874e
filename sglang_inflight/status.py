"""What a server says of itself, and each of its ranks: pauses, weights, what is staged."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sglang_inflight.answer import Answer

PauseMode = Literal["abort", "in_place", "retract", "wait"]
# of a server of a pair: it makes prompts' KV, or goes on from it. Any other does both
Role = Literal["prefill", "decode", "both"]

# the pause_id under which memory that is released holds generation back
MEMORY = "memory"


class Holder(Answer, frozen=True, kw_only=True):
    """Whoever keeps generation paused."""

    pause_id: str
    mode: PauseMode
    # None: for ever
    lease_left_s: float | None


class PauseStatus(Answer, frozen=True, kw_only=True):
    # "running", "draining" or "frozen"
    state: str
    paused: bool
    # the one asked for last among those held
    mode: PauseMode | None
    holders: tuple[Holder, ...]
    # requests
    running: int
    waiting: int


class WeightsStatus(Answer, frozen=True, kw_only=True):
    """Which weights are served."""

    weight_version: str
    # commits and rollbacks so far
    epoch: int
    # None: not computed yet, which the first commit does
    digest: str | None
    # what a rollback returns to
    previous_version: str | None


# how a group stands with which nothing is wrong
CONTROL_SYNC = "in step"


class StagingStatus(Answer, frozen=True, kw_only=True):
    """The update that is staged, and what may become of the next one."""

    # "device", "host" or "off"
    mode: str
    # "empty", "open" or "sealed"
    state: str
    update_id: str | None
    tensors: int
    bytes: int
    can_roll_back: bool
    # why the weights that are in place are a mixture
    dirty: str | None
    # why no update can be taken in
    refusal: str | None
    # with trainers, by name, and how each stands
    groups: dict[str, str]


# what is given back, of the kinds of memory in ``MemoryStatus``
GONE = ("away", "lost")


class MemoryStatus(Answer, frozen=True, kw_only=True):
    """Each kind of memory: "present", "away" (and will be as it was), "lost" (and will be
    hollow), or "hollow" (its contents are to be sent)."""

    weights: str = "present"
    kv_cache: str = "present"
    cuda_graph: str = "present"
    # why no request is served until updates have brought all weights
    hollow: str | None = None


class State(PauseStatus, frozen=True, kw_only=True):
    """All of these, side by side. A struct has one parent: the fields of weights are repeated."""

    weight_version: str
    epoch: int
    digest: str | None
    previous_version: str | None
    staging: StagingStatus
    # a server without it has no memory saver that we know of
    memory: MemoryStatus = MemoryStatus()


class RankStatus(State, frozen=True, kw_only=True):
    dp_rank: int
    tp_rank: int
    pp_rank: int


class Status(State, frozen=True, kw_only=True):
    """The state of the first rank, and of each. ``paused`` is true where any rank is."""

    # a server that runs without us says no more than that it is false, and why
    active: bool = True
    role: Role = "both"
    ranks: Annotated[tuple[RankStatus, ...], msgspec.Meta(min_length=1)]


class Inactive(Answer, frozen=True, kw_only=True):
    """A server that runs without us, and why."""

    active: bool = False
    message: str


def describe_inactive(why: str) -> dict[str, Any]:
    return Inactive(message=why).as_json()
