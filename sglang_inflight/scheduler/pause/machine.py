"""The pause machine: what becomes of a pause at each event. Data; no scheduler and no clock.

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

The loop runs in RUNNING; in DRAINING, but for what it admits; and in FROZEN not at all. An
event that is about a pause which is not held changes nothing, and a call is refused then.
What else decides is who holds pauses and whose call still waits for the draining to end:

- On a prefill server ``retract`` drains as ``wait`` does: what has begun there is soon over, and
  another server waits for it.
- RUNNING is where nobody holds a pause, DRAINING where a call waits, FROZEN all else.
- A pause that freezes at once ends the draining: the calls that wait for it are refused, and
  hold nothing. Those that drain as well wait together.
- Who lets go while draining leaves it frozen where the others that hold a pause had frozen it.
- Memory that is away holds a pause of its own, which only its return ends, and while it does
  nothing drains: no step can be made. Whoever continues then lets go of the pauses that were
  taken since, and is refused where there is none.

Every rank of a replica has the same machine and gives it the same events in the same order
(``pause.py``), so all move at the same boundary.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from sglang_inflight.messages import ContinueCall, PauseCall, PauseMode
from sglang_inflight.status import MEMORY

# They let requests run on until none does. The other modes freeze at once.
DRAINING_MODES: tuple[PauseMode, ...] = ("abort", "wait")


class PauseState(enum.Enum):
    RUNNING = "running"
    DRAINING = "draining"
    FROZEN = "frozen"


@dataclass(frozen=True)
class Holder:
    pause_id: str
    mode: PauseMode
    # time.monotonic() when the lease is over; None: never, or not as long as its call waits
    expires_at: float | None
    # what it is held for, where that is memory
    why: str | None = None


@dataclass(frozen=True)
class WaitingCall:
    """A call for a pause that is held, and not answered as long as the loop still drains.

    Its lease begins with its grant: before that its caller cannot know what is to be renewed.
    """

    call: PauseCall
    # time.monotonic() when "wait" has taken too long; None: never
    gives_up_at: float | None


# ---- events ------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """``call`` takes a pause or renews one, at ``now`` of ``time.monotonic()``."""

    call: PauseCall
    now: float
    # the modes that drain on this server
    draining: tuple[PauseMode, ...] = DRAINING_MODES


@dataclass(frozen=True)
class Continued:
    """``call`` lets go of one pause, or of all."""

    call: ContinueCall


@dataclass(frozen=True)
class LeaseOver:
    pause_id: str


@dataclass(frozen=True)
class WaitOver:
    """A ``wait`` has taken too long, at ``now`` of ``time.monotonic()``."""

    pause_id: str
    now: float


@dataclass(frozen=True)
class Drained:
    """Nothing runs any more, at ``now`` of ``time.monotonic()``."""

    now: float


@dataclass(frozen=True)
class MemoryAway:
    """Something of what a step needs goes, or is still away: ``why`` says what."""

    why: str


@dataclass(frozen=True)
class MemoryBack:
    """All of it is back."""


Event = Asked | Continued | LeaseOver | WaitOver | Drained | MemoryAway | MemoryBack


# ---- what is to be done on the scheduler -------------------------------------------


@dataclass(frozen=True)
class Retract:
    """Send running requests back to the queue."""


@dataclass(frozen=True)
class AbortAll:
    """End all requests, for ``call``."""

    call: PauseCall


@dataclass(frozen=True)
class Freeze:
    """Finish what is launched, and make no step any more. Once more where that is so."""


@dataclass(frozen=True)
class Drain:
    """Make steps, but only for what runs now."""


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
    """The caller holds nothing by this call."""

    call: PauseCall | ContinueCall
    why: str


@dataclass(frozen=True)
class LeaseExpired:
    pause_id: str


@dataclass(frozen=True)
class SayThatGenerationContinues:
    """Nobody asked for it."""


Reply = Grant | Released | Refuse | LeaseExpired | SayThatGenerationContinues


@dataclass(frozen=True)
class HeldPauses:
    """The pauses held, in the order in which they were asked for, and the calls that wait."""

    state: PauseState = PauseState.RUNNING
    holders: tuple[Holder, ...] = ()
    waiting: tuple[WaitingCall, ...] = ()

    def find(self, pause_id: str) -> Holder | None:
        return next((holder for holder in self.holders if holder.pause_id == pause_id), None)

    def others_than(self, pause_id: str) -> tuple[Holder, ...]:
        return tuple(holder for holder in self.holders if holder.pause_id != pause_id)

    @property
    def memory(self) -> Holder | None:
        """The pause of memory that is away."""
        return self.find(MEMORY)

    @property
    def taken_since_memory_went(self) -> bool:
        return self.memory is not None and self.holders[-1] is not self.memory

    @property
    def mode(self) -> PauseMode | None:
        """The mode asked for last among the pauses held."""
        return self.holders[-1].mode if self.holders else None

    @property
    def alarms(self) -> list[tuple[float, LeaseOver | WaitOver]]:
        """What happens by itself, and when."""
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
    """First the moves, then ``pauses`` holds, then the sayings. So an answer tells what is."""

    pauses: HeldPauses
    moves: tuple[Move, ...] = ()
    sayings: tuple[Reply, ...] = ()


def transition(pauses: HeldPauses, event: Event) -> Transition:
    """Defined for each event in each state; what cannot happen in a state changes nothing."""
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
        # it would let run what somebody else has frozen, and nothing runs anyhow
        return Transition(pauses, sayings=(Grant(call),))
    assert call.mode is not None
    return _take(pauses, asked, call.mode)


def _renew(pauses: HeldPauses, held: Holder | None, asked: Asked) -> Transition:
    call = asked.call
    if held is None:
        return Transition(pauses, sayings=(_refuse_unheld(call, call.pause_id),))
    mode = call.mode or held.mode
    if pauses.state is not PauseState.FROZEN or mode != held.mode:
        return _take(pauses, asked, mode)
    # what a "wait" left frozen must not run again
    renewed = replace(held, expires_at=_after(asked.now, call.lease_s))
    holders = tuple(renewed if holder is held else holder for holder in pauses.holders)
    return Transition(replace(pauses, holders=holders), sayings=(Grant(call),))


def _take(pauses: HeldPauses, asked: Asked, mode: PauseMode) -> Transition:
    call, now = asked.call, asked.now
    # while memory is away nothing can run to its end
    drains = mode in asked.draining and pauses.memory is None
    pauses, refusals = _withdraw(
        pauses,
        f"a pause of mode {mode} took its place",
        # those that drain as well are granted together, when nothing runs any more
        which=lambda waiting: not drains or waiting.call.pause_id == call.pause_id,
    )
    # at the end, because the last one asked for decides the mode
    holders = (
        *pauses.others_than(call.pause_id),
        Holder(call.pause_id, mode, None if drains else _after(now, call.lease_s)),
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
            return Transition(replace(pauses, holders=(memory,)), sayings=(Released(call),))
        why = f"generation cannot go on: {memory.why}"
        return Transition(pauses, sayings=(Refuse(call, why),))
    if call.pause_id is None:
        _, refusals = _withdraw(pauses, "generation was continued before it was granted")
        moves = _run_on(pauses, torch_empty_cache=call.torch_empty_cache)
        return Transition(HeldPauses(), moves, (*refusals, Released(call)))
    if pauses.find(call.pause_id) is None:
        return Transition(pauses, sayings=(_refuse_unheld(call, call.pause_id),))
    left = _let_go(pauses, call.pause_id, torch_empty_cache=call.torch_empty_cache)
    return left._replace(sayings=(*left.sayings, Released(call)))


def _end_lease(pauses: HeldPauses, pause_id: str) -> Transition:
    if pauses.find(pause_id) is None:
        return Transition(pauses)
    left = _let_go(pauses, pause_id, torch_empty_cache=False)
    said: tuple[Reply, ...] = (*left.sayings, LeaseExpired(pause_id))
    if not left.pauses.holders:
        said = (*said, SayThatGenerationContinues())
    return left._replace(sayings=said)


def _end_wait(pauses: HeldPauses, pause_id: str, now: float) -> Transition:
    # a lease that was over in the same pass may have taken the call along
    if not any(waiting.call.pause_id == pause_id for waiting in pauses.waiting):
        return Transition(pauses)
    pauses, refusals = _withdraw(
        pauses,
        "the timeout_s of another one ended the waiting",
        which=lambda waiting: waiting.call.pause_id != pause_id,
    )
    frozen = _freeze_drained(pauses, now)
    return frozen._replace(sayings=(*refusals, *frozen.sayings))


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
    return _let_go(pauses, MEMORY, torch_empty_cache=False)


def _let_go(pauses: HeldPauses, pause_id: str, *, torch_empty_cache: bool) -> Transition:
    """Forget the holder, and its call where that still waits."""
    before = pauses
    pauses, refusals = _withdraw(
        pauses,
        "it was let go before it was granted",
        which=lambda waiting: waiting.call.pause_id == pause_id,
    )
    holders = pauses.others_than(pause_id)
    if not holders:
        moves = _run_on(before, torch_empty_cache=torch_empty_cache)
        return Transition(HeldPauses(), moves, refusals)
    if before.state is PauseState.DRAINING and not pauses.waiting:
        # nobody asked for this draining but the one who left
        return Transition(HeldPauses(PauseState.FROZEN, holders), (Freeze(),), refusals)
    return Transition(replace(pauses, holders=holders), sayings=refusals)


def _run_on(pauses: HeldPauses, *, torch_empty_cache: bool) -> tuple[Move, ...]:
    return () if pauses.state is PauseState.RUNNING else (RunOn(torch_empty_cache),)


def _withdraw(
    pauses: HeldPauses, why: str, *, which: Callable[[WaitingCall], bool] = lambda waiting: True
) -> tuple[HeldPauses, tuple[Refuse, ...]]:
    """Without the waiting calls of ``which``, and without what they hold; and their refusals.

    The state is left as it was: the caller knows which comes of it.
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
    return Refuse(call, f"pause_id {pause_id!r} is not held: it was let go or ran out")


def _after(now: float, seconds: float | None) -> float | None:
    return None if seconds is None else now + seconds
