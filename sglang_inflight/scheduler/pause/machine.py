"""The pause machine: states, events and transitions. Pure data, with no scheduler or clock.

    event                    RUNNING    DRAINING                      FROZEN
    take in_place, retract   FROZEN     FROZEN                        FROZEN
    take abort, wait         DRAINING   DRAINING                      DRAINING or FROZEN
    take, unless frozen      DRAINING   DRAINING                      FROZEN
    renew                    RUNNING    DRAINING or FROZEN            FROZEN
    renew in_place, retract  RUNNING    DRAINING or FROZEN            FROZEN
    renew abort, wait        RUNNING    DRAINING                      DRAINING or FROZEN
    continue one             RUNNING    RUNNING, DRAINING or FROZEN   RUNNING or FROZEN
    continue all             RUNNING    RUNNING                       RUNNING or FROZEN
    lease over               RUNNING    RUNNING, DRAINING or FROZEN   RUNNING or FROZEN
    wait over                RUNNING    DRAINING or FROZEN            FROZEN
    drained                  RUNNING    FROZEN                        FROZEN
    memory away              FROZEN     DRAINING                      FROZEN
    memory back              RUNNING    DRAINING                      RUNNING or FROZEN

The loop runs freely in RUNNING. In DRAINING the loop runs only begun and aborted requests. In
FROZEN the loop makes no step. An event for a pause not held changes nothing, and its call is
refused. Where a cell has two states, the held pauses and the waiting calls decide:

- RUNNING: nobody holds a pause. DRAINING: a call waits for the end of the drain. FROZEN: all else.
- On a prefill server ``retract`` drains, as ``wait`` does: a begun request is soon done there, and
  a decode server waits for it.
- A pause that freezes at once ends a drain: the waiting calls are refused, and hold nothing.
  Several draining calls wait together.
- When the last waiting call releases its pause, the loop freezes again for the other holders.
- Released memory holds a pause of its own until the memory returns. Nothing drains until then,
  because no step can be made. ``continue all`` then releases only the pauses taken after the
  memory's, and is refused if there are none.

Every rank of a replica has the same machine, and gives it the same events in the same order
(``pause.py``). So all ranks move at the same boundary.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from sglang_inflight.messages import ContinueCall, NewRequests, PauseCall, PauseMode
from sglang_inflight.vocabulary.answers import MEMORY

# These modes freeze the loop after the last request has ended. The other modes freeze at once.
DRAINING_MODES: tuple[PauseMode, ...] = ("abort", "wait")


class PauseState(enum.Enum):
    RUNNING = "running"
    DRAINING = "draining"
    FROZEN = "frozen"


@dataclass(frozen=True)
class Holder:
    pause_id: str
    mode: PauseMode
    # time.monotonic() when the lease ends; None: no lease, or its call still waits
    expires_at: float | None
    # reason, for the pause that released memory holds
    why: str | None = None
    new_requests: NewRequests = "queue"


@dataclass(frozen=True)
class WaitingCall:
    """A call whose pause is held, but not granted before the loop has drained.

    Its lease begins with the grant: before, its caller does not know the pause to renew.
    """

    call: PauseCall
    # time.monotonic() at the end of a "wait" call's timeout_s; None: no timeout
    gives_up_at: float | None


# ---- events ------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """``call`` takes or renews a pause, at ``now`` of ``time.monotonic()``."""

    call: PauseCall
    now: float
    # draining modes of this server
    draining: tuple[PauseMode, ...] = DRAINING_MODES


@dataclass(frozen=True)
class Continued:
    """``call`` releases one pause, or all."""

    call: ContinueCall


@dataclass(frozen=True)
class LeaseOver:
    pause_id: str


@dataclass(frozen=True)
class WaitOver:
    """The ``timeout_s`` of a ``wait`` call ended, at ``now`` of ``time.monotonic()``."""

    pause_id: str
    now: float


@dataclass(frozen=True)
class Drained:
    """The last running request ended, at ``now`` of ``time.monotonic()``."""

    now: float


@dataclass(frozen=True)
class MemoryAway:
    """Memory needed by a step is about to be released, or still is. ``why`` is for errors."""

    why: str


@dataclass(frozen=True)
class MemoryBack:
    """All released memory has returned."""


Event = Asked | Continued | LeaseOver | WaitOver | Drained | MemoryAway | MemoryBack


# ---- what is to be done on the scheduler -------------------------------------------


@dataclass(frozen=True)
class Retract:
    """Send running requests back to the queue."""


@dataclass(frozen=True)
class AbortAll:
    """Abort all requests, for ``call``."""

    call: PauseCall


@dataclass(frozen=True)
class Freeze:
    """Finish the launched forwards, and make no more steps. Harmless when frozen already."""


@dataclass(frozen=True)
class Drain:
    """Make steps, but only for requests that have begun."""


@dataclass(frozen=True)
class RunOn:
    """Make steps."""

    torch_empty_cache: bool


Move = Retract | AbortAll | Freeze | Drain | RunOn


# ---- what is to be said ------------------------------------------------------------


@dataclass(frozen=True)
class Grant:
    """The loop is frozen."""

    call: PauseCall


@dataclass(frozen=True)
class Released:
    call: ContinueCall


@dataclass(frozen=True)
class Refuse:
    """``call`` took no pause, or released none."""

    call: PauseCall | ContinueCall
    why: str


@dataclass(frozen=True)
class LeaseExpired:
    pause_id: str


@dataclass(frozen=True)
class NotifyGenerationContinues:
    """Generation continues without a call: the last lease expired."""


@dataclass(frozen=True)
class NotifyNewRequests:
    """New requests are taken again without a call: the last rejecting lease expired."""


Reply = Grant | Released | Refuse | LeaseExpired | NotifyGenerationContinues | NotifyNewRequests


@dataclass(frozen=True)
class HeldPauses:
    """The pauses held, in the order of their calls, and the waiting calls."""

    state: PauseState = PauseState.RUNNING
    holders: tuple[Holder, ...] = ()
    waiting: tuple[WaitingCall, ...] = ()

    def find(self, pause_id: str) -> Holder | None:
        return next((holder for holder in self.holders if holder.pause_id == pause_id), None)

    def others_than(self, pause_id: str) -> tuple[Holder, ...]:
        return tuple(holder for holder in self.holders if holder.pause_id != pause_id)

    @property
    def memory(self) -> Holder | None:
        """The pause held by released memory."""
        return self.find(MEMORY)

    @property
    def taken_since_memory_went(self) -> bool:
        return self.memory is not None and self.holders[-1] is not self.memory

    @property
    def mode(self) -> PauseMode | None:
        """Mode of the latest pause held."""
        return self.holders[-1].mode if self.holders else None

    @property
    def new_requests(self) -> NewRequests:
        """Treatment of new requests: one holder that rejects them is enough."""
        rejects = any(holder.new_requests == "reject" for holder in self.holders)
        return "reject" if rejects else "queue"

    @property
    def alarms(self) -> list[tuple[float, LeaseOver | WaitOver]]:
        """Timed events, each with its time of ``time.monotonic()``."""
        times: list[tuple[float | None, LeaseOver | WaitOver]] = [
            *((holder.expires_at, LeaseOver(holder.pause_id)) for holder in self.holders),
            *(
                (each.gives_up_at, WaitOver(each.call.pause_id, each.gives_up_at))
                for each in self.waiting
                if each.gives_up_at is not None
            ),
        ]
        return [(at, event) for at, event in times if at is not None]


class Transition(NamedTuple):
    """The moves are made first, then ``pauses`` applies, then the replies are sent.

    So an answer reports the state after the moves.
    """

    pauses: HeldPauses
    moves: tuple[Move, ...] = ()
    replies: tuple[Reply, ...] = ()


def transition(pauses: HeldPauses, event: Event) -> Transition:
    """Return the transition of any event in any state. An impossible event changes nothing."""
    match event:
        case Asked():
            return _ask(pauses, event)
        case Continued(released):
            return _continue(pauses, released)
        case LeaseOver(pause_id):
            return _end_lease(pauses, pause_id)
        case WaitOver(pause_id, now):
            return _end_wait(pauses, pause_id, now)
        case Drained(now):
            return _freeze_drained(pauses, now) if pauses.waiting else Transition(pauses)
        case MemoryAway(why):
            return _memory_released(pauses, why)
        case MemoryBack():
            return _memory_resumed(pauses)


def _ask(pauses: HeldPauses, asked: Asked) -> Transition:
    call = asked.call
    held = pauses.find(call.pause_id)
    if call.renews or (call.may_be_held and held is not None):
        return _renew(pauses, held, asked)
    if call.yields and pauses.state is PauseState.FROZEN:
        # a drain would let requests run that another holder froze, and no request runs now
        return Transition(pauses, replies=(Grant(call),))
    assert call.mode is not None
    return _take(pauses, asked, call.mode)


def _renew(pauses: HeldPauses, held: Holder | None, asked: Asked) -> Transition:
    call = asked.call
    if held is None:
        return Transition(pauses, replies=(_refuse_unheld(call, call.pause_id),))
    mode = call.mode or held.mode
    if pauses.state is not PauseState.FROZEN or mode != held.mode:
        return _take(pauses, asked, mode)
    # stay frozen: renewing a granted "wait" must not drain again
    renewed = replace(
        held,
        expires_at=_after(asked.now, call.lease_s),
        new_requests=call.new_requests or held.new_requests,
    )
    holders = tuple(renewed if holder is held else holder for holder in pauses.holders)
    return Transition(replace(pauses, holders=holders), replies=(Grant(call),))


def _take(pauses: HeldPauses, asked: Asked, mode: PauseMode) -> Transition:
    call, now = asked.call, asked.now
    held = pauses.find(call.pause_id)
    new_requests = call.new_requests or (held.new_requests if held is not None else "queue")
    # while memory is released no request can finish
    drains = mode in asked.draining and pauses.memory is None
    pauses, refusals = _withdraw(
        pauses,
        f"a pause of mode {mode} took its place",
        # other draining calls keep waiting: all are granted when the last request has ended
        which=lambda waiting: not drains or waiting.call.pause_id == call.pause_id,
    )
    # last in the order, because the latest pause decides the mode
    holders = (
        *pauses.others_than(call.pause_id),
        Holder(
            call.pause_id,
            mode,
            None if drains else _after(now, call.lease_s),
            new_requests=new_requests,
        ),
    )
    if drains:
        gives_up_at = _after(now, call.timeout_s) if mode == "wait" else None
        waiting = (*pauses.waiting, WaitingCall(call, gives_up_at))
        moves: tuple[Move, ...] = (AbortAll(call), Drain()) if mode == "abort" else (Drain(),)
        return Transition(HeldPauses(PauseState.DRAINING, holders, waiting), moves, refusals)
    first: dict[PauseMode, tuple[Move, ...]] = {"retract": (Retract(),), "abort": (AbortAll(call),)}
    moves = (*first.get(mode, ()), Freeze())
    return Transition(HeldPauses(PauseState.FROZEN, holders), moves, (*refusals, Grant(call)))


def _continue(pauses: HeldPauses, call: ContinueCall) -> Transition:
    memory = pauses.memory
    if memory is not None and call.pause_id in (None, MEMORY):
        if call.pause_id is None and pauses.taken_since_memory_went:
            return Transition(replace(pauses, holders=(memory,)), replies=(Released(call),))
        why = f"generation cannot go on: {memory.why}"
        return Transition(pauses, replies=(Refuse(call, why),))
    if call.pause_id is None:
        _, refusals = _withdraw(pauses, "generation was continued before it was granted")
        moves = _run_on(pauses, torch_empty_cache=call.torch_empty_cache)
        return Transition(HeldPauses(), moves, (*refusals, Released(call)))
    if pauses.find(call.pause_id) is None:
        return Transition(pauses, replies=(_refuse_unheld(call, call.pause_id),))
    left = _release(pauses, call.pause_id, torch_empty_cache=call.torch_empty_cache)
    return left._replace(replies=(*left.replies, Released(call)))


def _end_lease(pauses: HeldPauses, pause_id: str) -> Transition:
    if pauses.find(pause_id) is None:
        return Transition(pauses)
    left = _release(pauses, pause_id, torch_empty_cache=False)
    replies: tuple[Reply, ...] = (*left.replies, LeaseExpired(pause_id))
    if not left.pauses.holders:
        replies = (*replies, NotifyGenerationContinues())
    elif left.pauses.new_requests != pauses.new_requests:
        replies = (*replies, NotifyNewRequests())
    return left._replace(replies=replies)


def _end_wait(pauses: HeldPauses, pause_id: str, now: float) -> Transition:
    # an expired lease may have withdrawn the call in the same pass
    if not any(waiting.call.pause_id == pause_id for waiting in pauses.waiting):
        return Transition(pauses)
    pauses, refusals = _withdraw(
        pauses,
        "another call's timeout_s ended the wait",
        which=lambda waiting: waiting.call.pause_id != pause_id,
    )
    frozen = _freeze_drained(pauses, now)
    return frozen._replace(replies=(*refusals, *frozen.replies))


def _freeze_drained(pauses: HeldPauses, now: float) -> Transition:
    granted = {waiting.call.pause_id: waiting.call for waiting in pauses.waiting}
    holders = tuple(
        holder
        if (call := granted.get(holder.pause_id)) is None
        else replace(holder, expires_at=_after(now, call.lease_s))
        for holder in pauses.holders
    )
    grants = tuple(Grant(call) for call in granted.values())
    return Transition(HeldPauses(PauseState.FROZEN, holders), (Freeze(),), grants)


def _memory_released(pauses: HeldPauses, why: str) -> Transition:
    if pauses.state is PauseState.DRAINING:
        return Transition(pauses)
    held = pauses.memory
    if held is None:
        memory = Holder(MEMORY, pauses.mode or "in_place", None, why)
        holders = (*pauses.holders, memory)
        return Transition(HeldPauses(PauseState.FROZEN, holders), (Freeze(),))
    holders = tuple(replace(held, why=why) if each is held else each for each in pauses.holders)
    return Transition(replace(pauses, holders=holders))


def _memory_resumed(pauses: HeldPauses) -> Transition:
    if pauses.memory is None:
        return Transition(pauses)
    return _release(pauses, MEMORY, torch_empty_cache=False)


def _release(pauses: HeldPauses, pause_id: str, *, torch_empty_cache: bool) -> Transition:
    """Release the pause of ``pause_id``, and refuse its call if it still waits."""
    before = pauses
    pauses, refusals = _withdraw(
        pauses,
        "it was released before it was granted",
        which=lambda waiting: waiting.call.pause_id == pause_id,
    )
    holders = pauses.others_than(pause_id)
    if not holders:
        moves = _run_on(before, torch_empty_cache=torch_empty_cache)
        return Transition(HeldPauses(), moves, refusals)
    if before.state is PauseState.DRAINING and not pauses.waiting:
        # the leaving holder was the only one to ask for this drain
        return Transition(HeldPauses(PauseState.FROZEN, holders), (Freeze(),), refusals)
    return Transition(replace(pauses, holders=holders), replies=refusals)


def _run_on(pauses: HeldPauses, *, torch_empty_cache: bool) -> tuple[Move, ...]:
    return () if pauses.state is PauseState.RUNNING else (RunOn(torch_empty_cache),)


def _withdraw(
    pauses: HeldPauses, why: str, *, which: Callable[[WaitingCall], bool] = lambda waiting: True
) -> tuple[HeldPauses, tuple[Refuse, ...]]:
    """Return ``pauses`` without the waiting calls of ``which`` and their pauses; and the refusals.

    The state is unchanged: the caller sets it.
    """
    gone = [waiting.call for waiting in pauses.waiting if which(waiting)]
    ids = {call.pause_id for call in gone}
    left = replace(
        pauses,
        holders=tuple(holder for holder in pauses.holders if holder.pause_id not in ids),
        waiting=tuple(waiting for waiting in pauses.waiting if not which(waiting)),
    )
    return left, tuple(Refuse(call, f"The pause was not granted: {why}.") for call in gone)


def _refuse_unheld(call: PauseCall | ContinueCall, pause_id: str) -> Refuse:
    return Refuse(call, f"pause_id {pause_id!r} is not held: it was released, or its lease ran out")


def _after(now: float, seconds: float | None) -> float | None:
    return None if seconds is None else now + seconds
