"""Every order of events, of any length, through the pause machine.

The machine is a function of the held pauses and an event, so an order is a path through reachable
states. There are few states. A property checked at each event in each state holds along every path.
All events happen at one time, and a call's id names its content, so states differing only in times
or ids are one state.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from sglang_inflight.messages import ContinueCall, PauseCall, PauseMode
from sglang_inflight.scheduler.pause import machine
from sglang_inflight.scheduler.pause.machine import (
    AbortAll,
    Asked,
    Continued,
    Drain,
    Drained,
    Event,
    Freeze,
    Grant,
    HeldPauses,
    LeaseExpired,
    LeaseOver,
    MemoryAway,
    MemoryBack,
    Move,
    NotifyGenerationContinues,
    PauseState,
    Refuse,
    Released,
    Retract,
    RunOn,
    Transition,
    WaitOver,
    transition,
)
from sglang_inflight.vocabulary.answers import MEMORY

RUNNING, DRAINING, FROZEN = PauseState
LEASE_S, TIMEOUT_S = 30.0, 60.0
# there are some 6300
MOST_STATES = 10_000
Make = Callable[[float], Event]


def ask(mode: PauseMode | None, pause_id: str, **how: Any) -> Make:
    call = PauseCall(
        call_id=f"{pause_id} {mode} {how}",
        mode=mode,
        pause_id=pause_id,
        lease_s=LEASE_S,
        timeout_s=TIMEOUT_S,
        **how,
    )
    return lambda now: Asked(call, now)


def resume(pause_id: str | None) -> Make:
    call = ContinueCall(call_id=f"{pause_id} continues", pause_id=pause_id)
    return lambda _: Continued(call)


def always(event: Event) -> Make:
    return lambda _: event


# makers of events, by name: each takes the time of its event
EVENTS: dict[str, Make] = {
    "a in_place": ask("in_place", "a"),
    "a retract": ask("retract", "a"),
    "a abort": ask("abort", "a"),
    "a wait": ask("wait", "a"),
    "b in_place": ask("in_place", "b"),
    "b retract": ask("retract", "b"),
    "b abort": ask("abort", "b"),
    "b wait": ask("wait", "b"),
    "b in_place, perhaps again": ask("in_place", "b", may_be_held=True),
    "b wait, perhaps again": ask("wait", "b", may_be_held=True),
    "an update waits": ask("wait", "update", yields=True),
    "SGLang's own abort": ask("abort", "upstream"),
    "a renews": ask(None, "a", renews=True),
    "b renews": ask(None, "b", renews=True),
    "a renews as in_place": ask("in_place", "a", renews=True),
    "a renews as abort": ask("abort", "a", renews=True),
    "a continues": resume("a"),
    "b continues": resume("b"),
    "all continue": resume(None),
    "a's lease is over": always(LeaseOver("a")),
    "b's lease is over": always(LeaseOver("b")),
    "a has waited too long": lambda now: WaitOver("a", now),
    "b has waited too long": lambda now: WaitOver("b", now),
    "drained": Drained,
    "memory away": always(MemoryAway("weights are released")),
    "memory back": always(MemoryBack()),
}


AS_SENT = {name: copy.deepcopy(make(0.0)) for name, make in EVENTS.items()}


def check(before: HeldPauses, event: Event, done: Transition) -> None:
    pauses = done.pauses
    held = [holder.pause_id for holder in pauses.holders]
    waiting = [each.call.pause_id for each in pauses.waiting]

    # the state follows from the held pauses
    assert (pauses.state is RUNNING) == (not held)
    assert (pauses.state is DRAINING) == bool(waiting)
    assert len(set(held)) == len(held)
    assert len(set(waiting)) == len(waiting)
    assert set(waiting) <= set(held)
    modes = {holder.pause_id: holder.mode for holder in pauses.holders}
    assert {modes[pause_id] for pause_id in waiting} <= {"abort", "wait"}
    without_lease = {holder.pause_id for holder in pauses.holders if holder.expires_at is None}
    assert without_lease == {*waiting, MEMORY} & set(held)

    # the moves bring the scheduler to that state, and no further move is made
    assert loop_after(done.moves, before.state) is pauses.state
    if before.state is RUNNING and pauses.state is RUNNING:
        assert done.moves == ()
    ends_requests = any(isinstance(move, Retract | AbortAll) for move in done.moves)
    assert not ends_requests or isinstance(event, Asked)

    # each call is answered once, or waits
    calls: list[Any] = [each.call for each in before.waiting]
    calls += [event.call] if isinstance(event, Asked | Continued) else []
    answered = [each.call for each in done.replies if isinstance(each, Grant | Released | Refuse)]
    assert ids([*answered, *(each.call for each in pauses.waiting)]) == ids(calls)
    # each answer is true at its time
    for reply in done.replies:
        if isinstance(reply, Grant):
            assert pauses.state is FROZEN
            assert reply.call.yields or reply.call.pause_id in held
        elif isinstance(reply, Released):
            assert reply.call.pause_id not in held
            assert reply.call.pause_id is not None or held in ([], [MEMORY])
        elif isinstance(reply, Refuse):
            assert reply.why
            # except by a later call
            assert reply.call.pause_id not in held or isinstance(event, Asked)
            # memory is named as the reason only while it holds generation back
            assert (MEMORY in held) or "cannot go on" not in reply.why
    continues = any(isinstance(reply, NotifyGenerationContinues) for reply in done.replies)
    ended = before.state is not RUNNING and pauses.state is RUNNING
    assert continues == (ended and isinstance(event, LeaseOver))
    lease_over = any(isinstance(reply, LeaseExpired) for reply in done.replies)
    assert lease_over == (isinstance(event, LeaseOver) and before.find(event.pause_id) is not None)

    # no step touches released memory, and only its return lets generation go on
    assert MEMORY not in held or pauses.state is FROZEN
    if before.memory is not None and not isinstance(event, MemoryBack):
        assert MEMORY in held

    # a holder without a call of its own keeps its pause, unless it waits
    if not (isinstance(event, Continued) and event.call.pause_id is None):
        idle = {holder.pause_id for holder in before.holders} - {pause_of(event)}
        assert idle - {each.call.pause_id for each in before.waiting} <= set(held)


def pause_of(event: Event) -> str | None:
    """Return the pause named by an event, or None."""
    match event:
        case Asked(call):
            return call.pause_id
        case Continued(resumes):
            return resumes.pause_id
        case LeaseOver(pause_id) | WaitOver(pause_id, _):
            return pause_id
        case MemoryAway() | MemoryBack():
            return MEMORY
        case Drained():
            return None


def loop_after(moves: tuple[Move, ...], loop: PauseState) -> PauseState:
    """Return the loop's state after the moves."""
    does = {Freeze: FROZEN, Drain: DRAINING, RunOn: RUNNING}
    for move in moves:
        loop = does.get(type(move), loop)
    return loop


def ids(calls: list[Any]) -> list[str]:
    return sorted(call.call_id for call in calls)


def key(pauses: HeldPauses) -> Any:
    waiting = tuple((each.call.call_id, each.gives_up_at) for each in pauses.waiting)
    return pauses.state, pauses.holders, waiting


Reachable = list[tuple[HeldPauses, Event, Transition]]


@pytest.fixture(scope="module")
def reachable() -> Reachable:
    """Return each event in each reachable state, with its transition.

    They are two million objects, which no later module's garbage collections should look at.
    """
    events = [make(0.0) for make in EVENTS.values()]
    begin = HeldPauses()
    known, pending, found = {key(begin)}, [begin], []
    while pending:
        before = pending.pop()
        for event in events:
            done = transition(before, event)
            found.append((before, event, done))
            if key(done.pauses) not in known:
                known.add(key(done.pauses))
                assert len(known) < MOST_STATES, f"more and more is held: {done.pauses}"
                pending.append(done.pauses)
    return found


def test_invariants_hold_in_every_order_of_pauses(reachable: Reachable) -> None:
    states = {before.state for before, _, _ in reachable}
    assert states == set(PauseState)
    for before, event, done in reachable:
        check(before, event, done)


def row_of(pauses: HeldPauses, event: Event) -> str:
    """Return the table's row of ``event``."""
    match event:
        case LeaseOver():
            return "lease over"
        case WaitOver():
            return "wait over"
        case Drained():
            return "drained"
        case MemoryAway():
            return "memory away"
        case MemoryBack():
            return "memory back"
        case Continued(resumes):
            return "continue all" if resumes.pause_id is None else "continue one"
        case Asked(call):
            modes = "abort, wait" if call.mode in ("abort", "wait") else "in_place, retract"
            if call.renews or (call.may_be_held and pauses.find(call.pause_id) is not None):
                return "renew" if call.mode is None else f"renew {modes}"
            return "take, unless frozen" if call.yields else f"take {modes}"


def test_docstrings_table_matches_machine(reachable: Reachable) -> None:
    table: dict[tuple[str, PauseState], set[PauseState]] = {}
    assert machine.__doc__ is not None
    rows = re.findall(r"^    (\w.*?)  +(\S.*?)  +(\S.*?)  +(\S.*)$", machine.__doc__, re.MULTILINE)
    assert rows[0] == ("event", "RUNNING", "DRAINING", "FROZEN")
    for row, *cells in rows[1:]:
        for state, cell in zip(PauseState, cells, strict=True):
            table[row, state] = {PauseState[name] for name in re.findall("[A-Z]+", cell)}
    found = defaultdict(set)
    for before, event, done in reachable:
        found[row_of(before, event), before.state].add(done.pauses.state)
    assert table == found


@pytest.mark.usefixtures("reachable")
def test_transition_does_not_change_messages() -> None:
    """The sender may send the message again."""
    assert {name: make(0.0) for name, make in EVENTS.items()} == AS_SENT


def after(*names: str) -> HeldPauses:
    pauses = HeldPauses()
    for now, name in enumerate(names, 1):
        pauses = transition(pauses, EVENTS[name](now)).pauses
    return pauses


@pytest.mark.parametrize(
    ("names", "modes"),
    [
        (("a in_place", "b retract"), [("a", "in_place"), ("b", "retract")]),
        # the last call decides the mode, and a renewal does not
        (("a in_place", "b retract", "a in_place"), [("b", "retract"), ("a", "in_place")]),
        (("a in_place", "b retract", "a renews"), [("a", "in_place"), ("b", "retract")]),
        (("a retract", "a renews as in_place"), [("a", "in_place")]),
        # a freeze ends the draining of other holders and takes their pauses
        (("a in_place", "b wait", "a in_place"), [("a", "in_place")]),
        (("a wait", "b abort", "a has waited too long"), [("a", "wait")]),
        (("a wait", "b abort", "drained"), [("a", "wait"), ("b", "abort")]),
        (("a in_place", "b wait", "b continues"), [("a", "in_place")]),
        (("a wait", "an update waits", "drained"), [("a", "wait"), ("update", "wait")]),
        (("a in_place", "an update waits"), [("a", "in_place")]),
        (("a retract", "memory away", "a's lease is over"), [("memory", "retract")]),
        (("a retract", "memory away", "memory back"), [("a", "retract")]),
        (("memory away", "b abort"), [("memory", "in_place"), ("b", "abort")]),
        (("a retract", "memory away", "b abort", "all continue"), [("memory", "retract")]),
        (
            ("a retract", "memory away", "all continue"),
            [("a", "retract"), ("memory", "retract")],
        ),
    ],
)
def test_order_of_calls_leaves_expected_holders_and_modes(
    names: tuple[str, ...], modes: list[tuple[str, str]]
) -> None:
    assert [(holder.pause_id, holder.mode) for holder in after(*names).holders] == modes


@pytest.mark.parametrize(
    ("names", "alarms"),
    [
        (("a in_place", "b retract"), [(1, LeaseOver("a")), (2, LeaseOver("b"))]),
        (("a in_place", "a renews"), [(2, LeaseOver("a"))]),
        # a waiting call's lease has not begun
        (("a abort", "b wait"), []),
        (("a in_place", "b wait"), [(1, LeaseOver("a"))]),
        (("a abort", "b wait", "drained"), [(3, LeaseOver("a")), (3, LeaseOver("b"))]),
        (("a in_place", "b wait", "drained"), [(1, LeaseOver("a")), (3, LeaseOver("b"))]),
        (("a wait", "b abort", "a has waited too long"), [(3, LeaseOver("a"))]),
        (("a in_place", "a wait", "a continues"), []),
    ],
)
def test_lease_alarms_count_from_the_grant(
    names: tuple[str, ...], alarms: list[tuple[float, LeaseOver]]
) -> None:
    found = [each for each in after(*names).alarms if isinstance(each[1], LeaseOver)]
    assert found == [(begun + LEASE_S, event) for begun, event in alarms]


def test_wait_alarms_count_from_the_call() -> None:
    assert after("a abort", "b wait").alarms == [(2 + TIMEOUT_S, WaitOver("b", 2 + TIMEOUT_S))]


@pytest.mark.parametrize(
    ("mode", "moves"),
    [
        ("in_place", (Freeze,)),
        ("retract", (Retract, Freeze)),
        ("abort", (AbortAll, Drain)),
        ("wait", (Drain,)),
    ],
)
def test_mode_makes_its_first_moves(mode: str, moves: tuple[type, ...]) -> None:
    done = transition(HeldPauses(), EVENTS[f"a {mode}"](1))
    assert tuple(type(move) for move in done.moves) == moves


def test_retract_drains_when_server_requires_it() -> None:
    call = PauseCall(call_id="a retracts", mode="retract", pause_id="a")
    asked = transition(HeldPauses(), Asked(call, 0.0, (*machine.DRAINING_MODES, "retract")))
    assert (asked.pauses.state, asked.moves, asked.replies) == (DRAINING, (Drain(),), ())
    drained = transition(asked.pauses, Drained(0.0))
    assert (drained.pauses.state, drained.pauses.mode) == (FROZEN, "retract")
    assert drained.replies == (Grant(call),)


def test_pause_refusal_names_reason() -> None:
    pauses = after("a wait")
    refused, granted = transition(pauses, EVENTS["b in_place"](2)).replies
    assert isinstance(refused, Refuse)
    assert refused.why == "The pause was not granted: a pause of mode in_place took its place."
    assert isinstance(granted, Grant)
    [unheld] = transition(HeldPauses(), EVENTS["b continues"](1)).replies
    assert isinstance(unheld, Refuse)
    assert unheld.why == "pause_id 'b' is not held: it was released, or its lease ran out"
