"""The machine of a rank's live weights: contents, events and transitions. Pure data, no tensors.

    event              WHOLE    TORN           LOST      HOLLOW            FILLED
    open               WHOLE    TORN           refused   HOLLOW            refused
    open partial       WHOLE    refused        refused   HOLLOW            refused
    announce write     TORN     TORN           refused   HOLLOW            refused
    write              TORN     TORN           refused   HOLLOW            refused
    not written        WHOLE    WHOLE or TORN  LOST      HOLLOW            refused
    drop               WHOLE    TORN           LOST      HOLLOW            refused
    read digest        WHOLE    TORN           refused   HOLLOW            refused
    forget previous    WHOLE    TORN           LOST      HOLLOW            FILLED
    begin commit       WHOLE    TORN           refused   HOLLOW            refused
    begin rollback     WHOLE    refused        refused   refused           refused
    begin turn         WHOLE    refused        refused   refused           refused
    commit             WHOLE    WHOLE or TORN  refused   HOLLOW or FILLED  refused
    roll back          WHOLE    refused        refused   refused           refused
    end turn           WHOLE    refused        refused   refused           refused
    break              TORN     TORN           refused   HOLLOW            refused
    fill               refused  refused        refused   refused           WHOLE
    miss               refused  refused        refused   HOLLOW            HOLLOW
    lose               LOST     LOST           LOST      LOST              refused
    empty              HOLLOW   HOLLOW         HOLLOW    HOLLOW            HOLLOW
    overwrite          WHOLE    TORN           LOST      HOLLOW            refused

WHOLE: one version's weights, or weights that other code has written and the loop serves all the
same. TORN: an update in place has written a part. LOST: the contents are gone with their memory.
HOLLOW: the memory is here, and updates must write each element. FILLED: updates have done so on
this rank, and the ranks have not compared notes. A forward runs only with WHOLE weights.

- Torn weights become whole by a commit, and by "not written" only if the write was announced. An
  update repairs torn weights only if it brings all of them.
- The previous version is held only while the contents are whole and a swap brings it back. So a
  rollback or a turn cannot find anything else.
- A commit, rollback or turn begins, exchanges the weights, and ends. Nothing else happens between.
- An update that was open when other code wrote the weights repairs nothing: it knows only the
  weights from before. Its commit leaves them hollow, torn or without a name.

The ranks of a replica step together, so they agree on what decides about a step: whether any was
written in place, and whether all are filled.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from functools import cached_property

from sglang_inflight.vocabulary.errors import Conflict
from sglang_inflight.vocabulary.labels import VersionLabel

# ---- states ------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    # digest of all live weights; None if unknown
    digest: str | None = None


@dataclass(frozen=True)
class Torn:
    why: str
    # roles of the partially written models
    roles: frozenset[str]
    # time.monotonic() of the first write, or of its announcement
    since: float
    # whether the loop is held for a write that has perhaps not begun
    is_announced: bool = False


@dataclass(frozen=True)
class Hollow:
    why: str
    # roles of the models that have their contents nevertheless
    kept: frozenset[str] = frozenset()
    # whether the unwritten elements bear marks
    is_marked: bool = False


@dataclass(frozen=True)
class Lost:
    was: Whole | Torn | Hollow


@dataclass(frozen=True)
class Filled:
    digest: str
    was: Hollow


Contents = Whole | Torn | Lost | Hollow | Filled


@dataclass(frozen=True)
class Previous:
    """The version before the last commit."""

    label: VersionLabel
    # the number ``Live.weights``
    weights: int
    # None if never computed: then no rollback is possible
    digest: str | None
    # a KV scale in which this version differs from the served one, see ``Voted``
    kv_scale: str | None = None
    # whether a swap brings it back
    is_held: bool = False

    @property
    def version(self) -> str:
        return self.label.version


class Exchange(enum.Enum):
    COMMIT = "commit"
    ROLLBACK = "rollback"
    TURN = "turn"


@dataclass(frozen=True)
class Live:
    """One rank's live weights."""

    contents: Contents = Whole()
    # whether the version's label describes the contents, or the last whole ones
    is_named: bool = True
    # whether other code has written or emptied the weights since the last update was opened
    is_overwritten: bool = False
    previous: Previous | None = None
    # number of the served contents: a commit begins a new one, a rollback returns to one
    weights: int = 0
    newest: int = 0
    # the exchange being made; in a turn the previous version is in place
    exchanging: Exchange | None = None
    exchanged: int = 0

    # asked for at each step, so computed once
    @cached_property
    def why_not_served(self) -> str | None:
        """Reason why no forward may use the weights, or None."""
        match self.contents:
            case Whole():
                return None
            case Torn(why) | Lost(Torn(why)):
                return f"The weights are partially written: {why}."
            case Hollow(why) | Filled(was=Hollow(why)) | Lost(Hollow(why)):
                return f"The weights are hollow: {why}."
            case Lost():
                return "The weights are lost: their memory was released, and no copy was kept."

    @cached_property
    def reachable(self) -> Previous | None:
        """The previous version, if a swap brings it back now."""
        return self.previous if self.previous is not None and self.previous.is_held else None


# ---- events ------------------------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """An update opens. It is staged where the previous version was. ``partial``: as in its call."""

    partial: bool


@dataclass(frozen=True)
class AnnounceWrite:
    """From ``now`` of ``time.monotonic()`` on, models of ``roles`` may be written in place."""

    why: str
    roles: frozenset[str]
    now: float


@dataclass(frozen=True)
class Write:
    """A part of the models of ``roles`` is written in place, or has been."""

    why: str
    roles: frozenset[str]
    now: float


@dataclass(frozen=True)
class NotWritten:
    """The update ended before its first write, on all ranks."""


@dataclass(frozen=True)
class Drop:
    """The open update was dropped."""


@dataclass(frozen=True)
class ReadDigest:
    """``digest`` was computed of the weights, before a commit."""

    digest: str


@dataclass(frozen=True)
class ForgetPrevious:
    pass


@dataclass(frozen=True)
class Begin:
    """The memory of the weights begins to hold another version."""

    exchange: Exchange


@dataclass(frozen=True)
class Commit:
    """The weights of ``digest`` are in place.

    ``base`` is the label of the weights live until now. ``is_reversible``: a swap brings them back.
    ``missing`` counts the elements of hollow weights not sent by any update so far. ``kv_scale``:
    one that this changes, see ``Voted``.
    """

    base: VersionLabel
    digest: str
    is_reversible: bool
    missing: int = 0
    kv_scale: str | None = None


@dataclass(frozen=True)
class RollBack:
    """The previous version is in place for good."""

    base: VersionLabel


@dataclass(frozen=True)
class EndTurn:
    """The served version is in place again."""


@dataclass(frozen=True)
class Break:
    """An exchange failed in its midst, at ``now`` of ``time.monotonic()``. ``roles``: all."""

    why: str
    roles: frozenset[str]
    now: float


@dataclass(frozen=True)
class Fill:
    """All ranks of the replica are filled."""


@dataclass(frozen=True)
class Miss:
    """Some rank of the replica misses elements."""

    why: str


@dataclass(frozen=True)
class Lose:
    """The memory was released without a copy."""


@dataclass(frozen=True)
class Empty:
    """The weights have no contents, except those of the roles ``kept``."""

    why: str
    kept: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Overwrite:
    """Other code has written the weights."""


Event = (
    Open
    | AnnounceWrite
    | Write
    | NotWritten
    | Drop
    | ReadDigest
    | ForgetPrevious
    | Begin
    | Commit
    | RollBack
    | EndTurn
    | Break
    | Fill
    | Miss
    | Lose
    | Empty
    | Overwrite
)

# ---- transitions -------------------------------------------------------------------

_HERE: tuple[type[Contents], ...] = (Whole, Torn, Hollow)
_UNFILLED: tuple[type[Contents], ...] = (Whole, Torn, Lost, Hollow)
_ANY: tuple[type[Contents], ...] = (*_UNFILLED, Filled)

# events are refused with other contents, and by ``why_not``
ALLOWED: dict[type[Event], tuple[type[Contents], ...]] = {
    Open: _HERE,
    AnnounceWrite: _HERE,
    Write: _HERE,
    NotWritten: _UNFILLED,
    Drop: _UNFILLED,
    ReadDigest: _HERE,
    ForgetPrevious: _ANY,
    Begin: _HERE,
    Commit: _HERE,
    RollBack: (Whole,),
    EndTurn: (Whole,),
    Break: _HERE,
    Fill: (Filled,),
    Miss: (Hollow, Filled),
    Lose: _UNFILLED,
    Empty: _ANY,
    Overwrite: _UNFILLED,
}

# exchanges that an event may end
ENDS: dict[type[Event], tuple[Exchange, ...]] = {
    Commit: (Exchange.COMMIT,),
    RollBack: (Exchange.ROLLBACK,),
    EndTurn: (Exchange.TURN,),
    Break: tuple(Exchange),
}


def why_not(live: Live, event: Event) -> str | None:
    """Return why ``event`` is refused, or None if it is allowed."""
    ends = ENDS.get(type(event))
    if ends is None and live.exchanging is not None:
        return f"the weights are being exchanged, by a {live.exchanging.value}"
    if ends is not None and live.exchanging not in ends:
        return f"no {' or '.join(each.value for each in ends)} has begun"
    if not isinstance(live.contents, ALLOWED[type(event)]):
        return live.why_not_served or "the weights are whole"
    match event:
        case Open(partial=True) if isinstance(live.contents, Torn):
            return (
                "only a whole update (partial=false) can repair partially written weights: "
                f"{live.contents.why}"
            )
        case Begin(Exchange.ROLLBACK | Exchange.TURN):
            if live.why_not_served is not None:
                return live.why_not_served
            if live.reachable is None:
                return "the previous version is not held"
    return None


def transition(live: Live, event: Event) -> Live:
    """Return the state after ``event``. Raises ``Conflict`` if it is refused."""
    if (why := why_not(live, event)) is not None:
        raise Conflict(why)
    contents = live.contents
    match event:
        case Open():
            # what an update that has ended announced counts as written
            if isinstance(contents, Torn):
                contents = replace(contents, is_announced=False)
            elif isinstance(contents, Hollow):
                contents = replace(contents, is_marked=True)
            gone = None if live.previous is None else replace(live.previous, is_held=False)
            return replace(live, contents=contents, previous=gone, is_overwritten=False)
        case AnnounceWrite(why, roles, now):
            return _tear(live, why, roles, now, is_announced=True)
        case Write(why, roles, now):
            return _tear(live, why, roles, now)
        case NotWritten():
            is_whole = isinstance(contents, Torn) and contents.is_announced
            return replace(live, contents=Whole()) if is_whole else live
        case Drop():
            # its writes in place belong to no version: the next update marks the weights anew
            is_hollow = isinstance(contents, Hollow)
            return replace(live, contents=_unknown(contents)) if is_hollow else live
        case ReadDigest(digest):
            is_of_these = isinstance(contents, Whole) and not live.is_overwritten
            return replace(live, contents=Whole(digest)) if is_of_these else live
        case ForgetPrevious():
            return replace(live, previous=None)
        case Begin(exchange):
            return replace(live, exchanging=exchange)
        case Commit():
            return _commit(_end_exchange(live), event)
        case RollBack(base):
            return _roll_back(_end_exchange(live), base)
        case EndTurn():
            return _end_exchange(live)
        case Break(why, roles, now):
            return _tear(_end_exchange(live), why, roles, now)
        case Fill():
            assert isinstance(contents, Filled)
            return replace(live, contents=Whole(contents.digest), is_named=True)
        case Miss(why):
            hollow = contents.was if isinstance(contents, Filled) else contents
            assert isinstance(hollow, Hollow)
            why = why if isinstance(contents, Filled) else hollow.why
            return replace(live, contents=replace(hollow, why=why))
        case Lose():
            assert not isinstance(contents, Filled)
            lost = contents if isinstance(contents, Lost) else Lost(contents)
            return replace(live, contents=lost, previous=None)
        case Empty(why, kept):
            return replace(
                _begin_weights(live),
                contents=Hollow(why, kept),
                previous=None,
                is_overwritten=True,
            )
        case Overwrite():
            return replace(
                _begin_weights(live),
                contents=_unknown(contents),
                previous=None,
                is_named=False,
                is_overwritten=True,
            )


def _unknown(contents: Contents) -> Contents:
    """Return ``contents`` after writes that belong to no version."""
    match contents:
        case Whole():
            return Whole()
        case Hollow():
            return replace(contents, is_marked=False)
        case _:
            return contents


def _tear(
    live: Live, why: str, roles: frozenset[str], now: float, *, is_announced: bool = False
) -> Live:
    """Return ``live`` with models of ``roles`` partially written. Hollow weights stay hollow."""
    match live.contents:
        case Whole():
            torn = Torn(why, roles, now, is_announced)
        case Torn() as before:
            torn = Torn(
                why, before.roles | roles, before.since, is_announced and before.is_announced
            )
        case _:
            return live
    gone = None if live.previous is None else replace(live.previous, is_held=False)
    return replace(live, contents=torn, previous=gone)


def _commit(live: Live, event: Commit) -> Live:
    before = live.contents
    previous = None
    if live.is_named and isinstance(before, Whole):
        previous = Previous(
            event.base, live.weights, before.digest, event.kv_scale, event.is_reversible
        )
    elif live.is_named and isinstance(before, Torn):
        previous = Previous(event.base, live.weights, None, event.kv_scale)
    live = replace(_begin_weights(live), previous=previous)
    if live.is_overwritten:
        return replace(live, contents=_unknown(before), is_overwritten=False)
    if not isinstance(before, Hollow):
        return replace(live, contents=Whole(event.digest), is_named=True)
    if event.missing:
        why = f"{event.missing} elements of them were not sent yet"
        return replace(live, contents=replace(before, why=why))
    return replace(live, contents=Filled(event.digest, before))


def _roll_back(live: Live, base: VersionLabel) -> Live:
    to, left = live.previous, live.contents
    assert to is not None
    assert isinstance(left, Whole)
    return replace(
        live,
        contents=Whole(to.digest),
        weights=to.weights,
        previous=Previous(base, live.weights, left.digest, to.kv_scale, is_held=True),
    )


def _end_exchange(live: Live) -> Live:
    return replace(live, exchanging=None, exchanged=live.exchanged + 1)


def _begin_weights(live: Live) -> Live:
    return replace(live, weights=live.newest + 1, newest=live.newest + 1)
