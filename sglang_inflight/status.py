"""Status of a server and of each rank: pauses, weights, staging, memory."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sglang_inflight.answer import Answer

PauseMode = Literal["abort", "in_place", "retract", "wait"]
# prefill or decode server of a pair; "both" without disaggregation
Role = Literal["prefill", "decode", "both"]

# pause_id of the pause held while memory is released
MEMORY = "memory"


class Holder(Answer, frozen=True, kw_only=True):
    """One held pause."""

    pause_id: str
    mode: PauseMode
    # None: no lease
    lease_left_s: float | None


class PauseStatus(Answer, frozen=True, kw_only=True):
    # "running", "draining" or "frozen"
    state: str
    paused: bool
    # mode of the latest held pause
    mode: PauseMode | None
    holders: tuple[Holder, ...]
    # counts of requests
    running: int
    waiting: int


class WeightsStatus(Answer, frozen=True, kw_only=True):
    """The served weights."""

    weight_version: str
    # commits and rollbacks so far
    epoch: int
    # None before the first commit, and while weights are lost or hollow
    digest: str | None
    # target of a rollback
    previous_version: str | None


# state of an intact group in ``StagingStatus.groups``
CONTROL_SYNC = "in step"


class StagingStatus(Answer, frozen=True, kw_only=True):
    """The open update, and whether the next one can be taken."""

    # "device", "host" or "off"
    mode: str
    # "empty", "open" or "sealed"
    state: str
    update_id: str | None
    tensors: int
    bytes: int
    can_roll_back: bool
    # why the live weights are partially written
    dirty: str | None
    # why the server takes no updates
    refusal: str | None
    # trainers' groups: name -> state
    groups: dict[str, str]


# states of released memory in ``MemoryStatus``
GONE = ("away", "lost")


class MemoryStatus(Answer, frozen=True, kw_only=True):
    """State of each kind of memory.

    "present"; "away": released, and restored by a resume; "lost": released without a copy;
    "hollow": resumed, with contents still to be sent.
    """

    weights: str = "present"
    kv_cache: str = "present"
    cuda_graph: str = "present"
    # why no request is served: updates must bring all weights first
    hollow: str | None = None


class State(PauseStatus, frozen=True, kw_only=True):
    """The status of pauses, weights, staging and memory.

    A struct has one parent, so the fields of ``WeightsStatus`` are repeated here.
    """

    weight_version: str
    epoch: int
    digest: str | None
    previous_version: str | None
    staging: StagingStatus
    # the default covers servers without a memory saver
    memory: MemoryStatus = MemoryStatus()


class RankStatus(State, frozen=True, kw_only=True):
    dp_rank: int
    tp_rank: int
    pp_rank: int


class Status(State, frozen=True, kw_only=True):
    """The first rank's state, and every rank's. ``paused`` is true if any rank is paused."""

    # an inactive server answers ``Inactive`` instead
    active: bool = True
    role: Role = "both"
    ranks: Annotated[tuple[RankStatus, ...], msgspec.Meta(min_length=1)]


class Inactive(Answer, frozen=True, kw_only=True):
    """Status of a server running without SGLang Inflight, with the reason."""

    active: bool = False
    message: str


def describe_inactive(why: str) -> dict[str, Any]:
    return Inactive(message=why).as_json()
