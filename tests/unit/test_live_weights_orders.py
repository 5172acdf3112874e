"""Every order of events, of any length, through the machine of the live weights.

Beside the machine goes what the memory really holds, as numbers of contents. So a state that says
more than the memory has is found, along whichever path. Numbers are used again when nothing has
them any more, so there are few states.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

import pytest

from sglang_inflight.scheduler.update import live_machine
from sglang_inflight.scheduler.update.live_machine import (
    ALLOWED,
    AnnounceWrite,
    Begin,
    Break,
    Commit,
    Contents,
    Drop,
    Empty,
    EndTurn,
    Event,
    Exchange,
    Fill,
    Filled,
    ForgetPrevious,
    Hollow,
    Live,
    Lose,
    Lost,
    Miss,
    NotWritten,
    Open,
    Overwrite,
    ReadDigest,
    RollBack,
    Torn,
    Whole,
    Write,
    transition,
    why_not,
)
from sglang_inflight.vocabulary.errors import Conflict
from sglang_inflight.vocabulary.labels import VersionLabel

KINDS: tuple[type[Contents], ...] = (Whole, Torn, Lost, Hollow, Filled)
ROLES = frozenset({"target"})
MOST_STATES = 20_000


@dataclass(frozen=True)
class Truth:
    """Contents of the memory. A number stands for whole ones, None for anything else."""

    weights: int | None = 0
    # what the last commit exchanged, and a swap would bring back
    shadow: int | None = None
    # contents of the version of that name, the latest label's
    named: int = 0
    # the open update: whether it is partial
    open: bool | None = None
    # contents when the update was opened
    base: int | None = None
    # whether a forward could run by what the open update has written
    wrote: bool = False
    # a drop waits for the ranks' word on whether anything was written
    is_dropped: bool = False
    # whether marks show exactly what updates have not sent to hollow weights
    has_true_marks: bool = False
    # whether other code has written since the update was opened
    is_overwritten: bool = False
    exchanging: Exchange | None = None

    @property
    def unused(self) -> tuple[int, int]:
        """Two numbers that nothing has."""
        used = {self.weights, self.shadow, self.named, self.base}
        one, other, *_ = [number for number in range(6) if number not in used]
        return one, other


def digest_of(contents: int | None) -> str:
    return f"digest {contents}"


def label_of(contents: int | None) -> VersionLabel:
    return VersionLabel(0, f"v{contents}")


Step = tuple[Event, Truth]


def steps(live: Live, truth: Truth) -> Iterator[Step]:
    """Yield what can happen next on a rank, with what the memory holds then.

    The callers' own rules are in it: ``Staging`` opens one update at a time, and hollow weights
    are written in place.
    """
    is_hollow = isinstance(live.contents, Hollow)
    if truth.exchanging is not None:
        yield from ends(live, truth)
        return
    if isinstance(live.contents, Filled):
        yield Fill(), replace(truth, has_true_marks=False)
        yield Miss("another rank"), truth
        return
    nothing = replace(truth, weights=None, has_true_marks=False)
    yield Empty("for a test"), replace(nothing, shadow=None, is_overwritten=True)
    # other code leaves contents, where there were some
    foreign = None if truth.weights is None else truth.unused[0]
    yield (
        Overwrite(),
        replace(truth, weights=foreign, has_true_marks=False, is_overwritten=True),
    )
    if truth.open is None:
        yield from steps_between_updates(live, truth)
        return
    if not is_hollow:
        torn = replace(truth, weights=None, wrote=True)
        yield Write("a write", ROLES, 0.0), torn
        announced = AnnounceWrite("a write", ROLES, 0.0)
        yield announced, truth
        yield announced, torn
    yield Drop(), replace(truth, open=None, is_dropped=True, has_true_marks=False)
    if truth.base is not None:
        yield ReadDigest(digest_of(truth.base)), truth
    yield Begin(Exchange.COMMIT), replace(truth, exchanging=Exchange.COMMIT)


def steps_between_updates(live: Live, truth: Truth) -> Iterator[Step]:
    if truth.is_dropped and not truth.wrote:
        yield NotWritten(), replace(truth, is_dropped=False)
    for partial in (False, True):
        hollow = live.contents if isinstance(live.contents, Hollow) else None
        marks = truth.has_true_marks or (hollow is not None and not hollow.is_marked)
        yield (
            Open(partial),
            replace(
                truth,
                open=partial,
                base=truth.weights,
                shadow=None,
                wrote=False,
                is_dropped=False,
                has_true_marks=marks,
                is_overwritten=False,
            ),
        )
    yield ForgetPrevious(), replace(truth, shadow=None)
    yield Lose(), replace(truth, weights=None, shadow=None, has_true_marks=False)
    for exchange in (Exchange.ROLLBACK, Exchange.TURN):
        yield (
            Begin(exchange),
            replace(truth, exchanging=exchange, weights=truth.shadow, shadow=truth.weights),
        )


def ends(live: Live, truth: Truth) -> Iterator[Step]:
    done = replace(truth, exchanging=None)
    yield Break("an exchange", ROLES, 0.0), replace(done, weights=None, shadow=None, open=None)
    base = label_of(truth.named)
    if truth.exchanging is Exchange.ROLLBACK:
        assert truth.weights is not None
        yield RollBack(base), replace(done, named=truth.weights)
    elif truth.exchanging is Exchange.TURN:
        yield EndTurn(), replace(done, weights=truth.shadow, shadow=truth.weights)
    else:
        for is_reversible in (False, True):
            for missing in (0, 5) if isinstance(live.contents, Hollow) else (0,):
                new, _ = truth.unused
                yield (
                    Commit(base, digest_of(new), is_reversible, missing),
                    replace(
                        done,
                        weights=committed(live, truth, missing),
                        shadow=truth.weights if is_reversible else None,
                        named=new,
                        open=None,
                    ),
                )


def committed(live: Live, truth: Truth, missing: int) -> int | None:
    """Return what a commit leaves in memory: its version only if its update knew everything."""
    new, mixed = truth.unused
    if isinstance(live.contents, Hollow):
        is_whole = truth.has_true_marks and not truth.is_overwritten and not missing
        return new if is_whole else None
    if truth.is_overwritten:
        # the update's part, and the other code's
        return None if truth.weights is None else mixed
    return new if not truth.open or truth.base is not None else None


def check(before: Live, event: Event, live: Live, truth: Truth) -> None:
    contents, previous = live.contents, live.previous
    is_served = live.why_not_served is None
    assert is_served == isinstance(contents, Whole)
    assert live.exchanging is truth.exchanging

    # a forward runs only with whole contents
    assert not is_served or truth.weights is not None
    if is_served and live.exchanging is None:
        # the name and the digest are theirs
        assert not live.is_named or truth.weights == truth.named
        assert isinstance(contents, Whole)
        assert contents.digest in (None, digest_of(truth.weights))

    # a rollback or a turn brings back whole contents, as the state describes them
    if live.reachable is not None and live.exchanging is not Exchange.COMMIT:
        assert previous is not None
        there = truth.shadow if live.exchanging is None else truth.weights
        assert there is not None
        assert previous.label == label_of(there)
        assert previous.digest in (None, digest_of(there))
        assert previous.weights != live.weights
        assert is_served
        assert live.is_named

    # other contents for good have another number, and a rollback's have their old one
    if isinstance(event, Commit | Empty | Overwrite):
        assert live.weights > before.newest
    elif isinstance(event, RollBack):
        assert before.previous is not None
        assert live.weights == before.previous.weights
    else:
        assert live.weights == before.weights


def key(live: Live) -> Live:
    """Return ``live`` without counts, which grow."""
    previous = None if live.previous is None else replace(live.previous, weights=-1)
    return replace(live, weights=0, newest=0, exchanged=0, previous=previous)


@functools.cache
def reachable() -> tuple[Live, ...]:
    """Return a state of each kind that callers reach. Each transition is checked."""
    known = {(Live(), Truth()): Live()}
    pending = [(Live(), Truth())]
    while pending:
        before, truth = pending.pop()
        for event, after in steps(before, truth):
            if why_not(before, event) is not None:
                continue
            live = transition(before, event)
            check(before, event, live, after)
            if (key(live), after) not in known:
                known[key(live), after] = live
                assert len(known) < MOST_STATES
                pending.append((live, after))
    return tuple(known.values())


def test_no_order_of_events_serves_or_names_what_is_not_there() -> None:
    assert {type(live.contents) for live in reachable()} == set(KINDS)


ROWS: dict[str, Event] = {
    "open": Open(partial=False),
    "open partial": Open(partial=True),
    "announce write": AnnounceWrite("a write", ROLES, 0.0),
    "write": Write("a write", ROLES, 0.0),
    "not written": NotWritten(),
    "drop": Drop(),
    "read digest": ReadDigest("digest"),
    "forget previous": ForgetPrevious(),
    "begin commit": Begin(Exchange.COMMIT),
    "begin rollback": Begin(Exchange.ROLLBACK),
    "begin turn": Begin(Exchange.TURN),
    "commit": Commit(label_of(0), "digest", is_reversible=True),
    "commit, some missing": Commit(label_of(0), "digest", is_reversible=False, missing=5),
    "roll back": RollBack(label_of(0)),
    "end turn": EndTurn(),
    "break": Break("an exchange", ROLES, 0.0),
    "fill": Fill(),
    "miss": Miss("another rank"),
    "lose": Lose(),
    "empty": Empty("for a test"),
    "overwrite": Overwrite(),
}


def test_docstrings_table_matches_machine() -> None:
    assert live_machine.__doc__ is not None
    lines = re.findall(r"^    (\w.*)$", live_machine.__doc__, re.MULTILINE)
    [heads, *rows] = [re.split(r"  +", line) for line in lines]
    assert heads == ["event", *(kind.__name__.upper() for kind in KINDS)]
    table = {
        (row, kind.__name__.upper()): set(cell.split(" or "))
        for row, *cells in rows
        for kind, cell in zip(KINDS, cells, strict=True)
    }
    found = defaultdict(set)
    for live in reachable():
        for row, event in ROWS.items():
            # only updates of hollow weights count what is missing
            if row.endswith("missing") and not isinstance(live.contents, Hollow):
                continue
            if live.exchanging in live_machine.ENDS.get(type(event), (None,)):
                name = type(live.contents).__name__.upper()
                found[row.removesuffix(", some missing"), name].add(kind_after(live, event))
    # an event that ends an exchange does not come where none begins
    for row, kind in table.keys() - found.keys():
        found[row, kind].add("refused")
    # refused for want of a previous version, and not by the contents
    for row in ("begin rollback", "begin turn"):
        found[row, "WHOLE"].discard("refused")
    assert table == found


def kind_after(live: Live, event: Event) -> str:
    if why_not(live, event) is not None:
        return "refused"
    return type(transition(live, event).contents).__name__.upper()


def test_nothing_happens_within_an_exchange() -> None:
    exchanging = [live for live in reachable() if live.exchanging is not None]
    assert {live.exchanging for live in exchanging} == set(Exchange)
    for live in exchanging:
        assert live.exchanging is not None
        for event in ROWS.values():
            if live.exchanging in live_machine.ENDS.get(type(event), ()):
                assert transition(live, event).exchanging is None
            else:
                with pytest.raises(Conflict):
                    transition(live, event)


def test_each_event_has_a_row() -> None:
    assert {type(event) for event in ROWS.values()} == set(get_args(Event)) == set(ALLOWED)


@pytest.mark.parametrize(
    ("contents", "event", "why"),
    [
        (Torn("for a test", ROLES, 0.0), Open(partial=True), "only a whole update"),
        (Torn("for a test", ROLES, 0.0), Begin(Exchange.TURN), "partially written: for a test"),
        (Hollow("for a test"), Begin(Exchange.ROLLBACK), "hollow: for a test"),
        (Lost(Whole()), Open(partial=False), "their memory was released"),
        (Whole(), Begin(Exchange.ROLLBACK), "the previous version is not held"),
        (Whole(), EndTurn(), "no turn has begun"),
        (Whole(), Fill(), "the weights are whole"),
    ],
)
def test_refusal_names_reason(contents: Contents, event: Event, why: str) -> None:
    with pytest.raises(Conflict, match=why):
        transition(Live(contents), event)
