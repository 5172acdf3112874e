"""The update with the turn: its phases, and everything its calls asked for, up to its receipt.

    phase       event    next
    OPEN        STAGE    OPEN          a call brings tensors
    OPEN        SEAL     SEALING       every rank is asked to check the whole, and to vote
    SEALING     VOTE     SEALED        all of them voted for it
    SEALED      COMMIT   COMMITTING    the commit is sent, and cannot be called back
    COMMITTING  END      ENDED         every rank has answered it, or is silent
    OPEN        DROP     DROPPED       a call failed, its caller left, its lease ran out, or
    SEALING     DROP     DROPPED       somebody aborted or replaced it
    SEALED      DROP     DROPPED

Other transitions cannot happen. So a commit is sent only after all votes, an update takes no
tensors after its vote was asked for, and an update is committed or dropped, never both.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_inflight.frontend.aio import Deadline, SharedCall
from sglang_inflight.frontend.ranks import rank_of
from sglang_inflight.frontend.updates.wanted import Ending, Opening, Wanted
from sglang_inflight.messages import (
    AskedDigests,
    Committed,
    DiskSource,
    IPCSource,
    OpenCall,
    SealCall,
    StageCall,
    Staged,
    Voted,
)
from sglang_inflight.topology import Rank
from sglang_inflight.vocabulary.answers import RankReceipt, Receipt, StagedChanges
from sglang_inflight.vocabulary.errors import Altered, Conflict, Dropped, Refused, list_names
from sglang_inflight.vocabulary.kept_kv import FENCE, KeptKV


class Phase(enum.Enum):
    OPEN = "open"
    SEALING = "sealing"
    SEALED = "sealed"
    COMMITTING = "committing"
    ENDED = "ended"
    DROPPED = "dropped"


class Event(enum.Enum):
    STAGE = "stage"
    SEAL = "seal"
    VOTE = "vote"
    COMMIT = "commit"
    END = "end"
    DROP = "drop"


TABLE: dict[tuple[Phase, Event], Phase] = {
    (Phase.OPEN, Event.STAGE): Phase.OPEN,
    (Phase.OPEN, Event.SEAL): Phase.SEALING,
    (Phase.SEALING, Event.VOTE): Phase.SEALED,
    (Phase.SEALED, Event.COMMIT): Phase.COMMITTING,
    (Phase.COMMITTING, Event.END): Phase.ENDED,
    (Phase.OPEN, Event.DROP): Phase.DROPPED,
    (Phase.SEALING, Event.DROP): Phase.DROPPED,
    (Phase.SEALED, Event.DROP): Phase.DROPPED,
}


def follow(phase: Phase, event: Event) -> Phase | None:
    """Return the next phase, or None if ``event`` cannot happen in ``phase``."""
    return TABLE.get((phase, event))


@dataclass
class OpenUpdate:
    """One call, or a session of many. Belongs to ``Updates`` and the front end's event loop."""

    opening: Opening
    # called when the lease expires
    expire: Callable[[OpenUpdate], None]
    phase: Phase = Phase.OPEN
    weight_version: str | None = None
    asked_kv: KeptKV | None = None
    torch_empty_cache: bool = False
    aborts_requests: bool = False
    # ranks write the live weights, and hold requests back from the first write on
    in_place: bool = False
    staged_s: float = 0.0
    staged_as: StagedChanges | None = None
    # see ``Voted``
    kv_scale: str | None = None
    tensors: int = 0
    bytes: int = 0
    # how many tensors were quantized on arrival, by what came and what is served
    quantized: Counter[str] = field(default_factory=Counter)
    # names of tensors that have to come whole, on any rank
    unpatched: tuple[str, ...] = ()
    # what the ranks did not take over from a checkpoint
    warnings: tuple[str, ...] = ()
    # digest of all tensors that came to each rank, None if the ranks do not know it
    received: dict[Rank, str | None] = field(default_factory=dict)
    # checkpoint of an update from disk
    checkpoint: DiskSource | None = None
    is_of_checkpoint_engine: bool = False
    # whether the pieces so far named the session; None before the first piece
    is_named: bool | None = None
    lease_s: float | None = None
    why_dropped: str | None = None
    # time.monotonic() at the drop
    dropped_at: float = 0.0
    over: asyncio.Event = field(default_factory=asyncio.Event)
    # each runs once, however many callers ask
    being_opened: SharedCall[None] = field(default_factory=SharedCall)
    being_sealed: SharedCall[None] = field(default_factory=SharedCall)
    being_ended: SharedCall[Receipt] = field(default_factory=SharedCall)
    # set when the commit is sent; runs to its end even if its caller disconnects
    committing: asyncio.Future[Receipt] | None = None
    # digests of layouts without which pieces came, and were refused: they must come with them
    owed: set[str] = field(default_factory=set)
    _lease: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.lease_s = self.opening.lease_s

    @property
    def id(self) -> str:
        return self.opening.id

    @property
    def kept_kv(self) -> KeptKV:
        """Policy of the commit, as asked for so far."""
        return self.asked_kv or FENCE

    # ---- phases --------------------------------------------------------------------

    def allows(self, event: Event) -> bool:
        return follow(self.phase, event) is not None

    def move(self, event: Event) -> None:
        """Go to the phase after ``event``. Raises ``Dropped`` if the update was dropped."""
        self.require_alive()
        phase = follow(self.phase, event)
        assert phase is not None, f"{event} in {self.phase}"
        self.phase = phase
        if phase is Phase.DROPPED:
            self.dropped_at = time.monotonic()
        if phase in (Phase.ENDED, Phase.DROPPED):
            self.over.set()
            self._end_lease()

    def require_alive(self) -> None:
        """Raise ``Dropped`` if the update was dropped. Any await may have allowed that."""
        if self.phase is Phase.DROPPED:
            raise Dropped(f"the update was dropped before its commit: {self.why_dropped}")

    # ---- what its calls ask for ----------------------------------------------------

    def is_foreign(self, wanted: Wanted) -> bool:
        """Return whether a call is an update of its own, not a piece of this session.

        SGLang's clients name no session. A session begun in SGLang's way takes every call without
        a ``session_id``, unless the call sets ``on_busy``. A named session is safe from other
        callers' pieces, late ones of a dead sender included.
        """
        if wanted.session_id is not None:
            return False
        return not self.takes_unnamed or wanted.on_busy != "wait"

    @property
    def takes_unnamed(self) -> bool:
        """True if a call without a ``session_id`` may be a piece of this session."""
        return self.opening.takes_unnamed and self.is_named is not True

    def claim(self, wanted: Wanted) -> None:
        """Note a piece. Raises ``Conflict`` if it names the session and an earlier one did not."""
        if wanted.session_id is not None and self.is_named is False:
            raise Conflict(
                "a call without a session_id has sent weights into this session, perhaps from "
                "another trainer: the session is dropped"
            )
        self.is_named = wanted.session_id is not None

    def add(self, wanted: Wanted) -> None:
        """Add a piece's wishes. The last named version wins, and the last explicit KV policy."""
        self.weight_version = wanted.weight_version or self.weight_version
        self.torch_empty_cache |= wanted.torch_empty_cache
        self.aborts_requests |= wanted.aborts_requests
        if self.asked_kv is None or wanted.kept_kv_is_explicit:
            self.asked_kv = wanted.kept_kv
        of_draft = "draft" in (wanted.selector, self.opening.selector)
        if isinstance(wanted.source, DiskSource) and not of_draft:
            self.checkpoint = wanted.source
        self.is_of_checkpoint_engine |= isinstance(wanted.source, IPCSource)

    def finish(self, ending: Ending) -> None:
        """Add the session's end, with fields overriding the pieces'."""
        self.asked_kv = ending.kept_kv or self.kept_kv
        self.weight_version = ending.weight_version or self.weight_version
        self.torch_empty_cache |= ending.torch_empty_cache

    # ---- what its ranks answer -----------------------------------------------------

    def count(self, staged: list[Staged]) -> None:
        """Add up what was staged: ranks differ in bytes and in time, so take their maxima."""
        self.staged_s += max(rank.staged_s for rank in staged)
        self.tensors += staged[0].tensors
        self.bytes += max(rank.bytes for rank in staged)
        self.quantized.update(staged[0].quantized)
        self.unpatched = tuple(sorted({name for rank in staged for name in rank.unpatched}))
        # each once, in their order
        said = [*self.warnings, *(warning for rank in staged for warning in rank.warnings)]
        self.warnings = tuple(dict.fromkeys(said))
        saved = {rank.saved for rank in staged}
        if len(saved) > 1:
            raise Refused("the ranks have read different saves: the folder was written meanwhile")
        if (one := saved.pop()) is not None:
            self.weight_version = self.weight_version or one.weight_version

    def count_votes(self, votes: list[Voted]) -> None:
        self.staged_s += max(rank.staged_s for rank in votes)
        self.received = _received(votes)
        self.kv_scale = next((rank.kv_scale for rank in votes if rank.kv_scale), None)
        self.staged_as = _together([rank.staged_as for rank in votes], self.opening.why_in_place)

    def require_all_layouts(self) -> None:
        """Raise ``Refused`` if a piece refused with ``UnknownLayout`` was not repeated."""
        if self.owed:
            raise Refused(
                "the session is not complete: a piece was refused because its layout is not known "
                f"here, and it was not repeated with the whole layout: {list_names([*self.owed])}"
            )

    def expect(self, expected_digest: str | None) -> None:
        """Raise ``Altered`` unless all voting ranks received tensors of this digest, if any."""
        if expected_digest is not None:
            _require_received(self.received, expected_digest, "the session")

    # ---- its lease -----------------------------------------------------------------

    def renew_lease(self) -> None:
        """Restart the lease of ``lease_s`` seconds, if there is one."""
        self._end_lease()
        if self.lease_s is not None and not self.over.is_set():
            self._lease = asyncio.get_running_loop().call_later(self.lease_s, self.expire, self)

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()

    # ---- messages ------------------------------------------------------------------

    def open_call(self, deadline: Deadline, *, proves_again: bool = False) -> OpenCall:
        return OpenCall(
            update_id=self.id,
            selector=self.opening.selector,
            partial=self.opening.partial,
            expected_version=self.opening.expected_version,
            as_before=self.opening.as_before,
            may_be_empty=self.opening.may_be_empty,
            in_place=self.opening.why_in_place is not None,
            proves_again=proves_again,
            asks_digests=self.opening.asks_digests,
            timeout_s=deadline.seconds_left,
        )

    def stage_call(self, wanted: Wanted) -> StageCall:
        return StageCall(
            update_id=self.id,
            source=wanted.source,
            selector=wanted.selector,
            digests=wanted.digests or (AskedDigests() if self.opening.asks_digests else None),
            timeout_s=wanted.deadline.seconds_left,
        )

    def seal_call(self, deadline: Deadline) -> SealCall:
        return SealCall(update_id=self.id, timeout_s=deadline.seconds_left)


def expect_staged(staged: list[Staged], expected_digest: str | None) -> None:
    """Raise ``Altered`` unless all ranks received a call's tensors of this digest, if any."""
    if expected_digest is not None:
        _require_received(_received(staged), expected_digest, "the call")


def _received(answers: list[Staged] | list[Voted]) -> dict[Rank, str | None]:
    return {rank_of(answer): answer.received_digest for answer in answers}


def _require_received(received: dict[Rank, str | None], expected: str, what: str) -> None:
    if None in received.values():
        raise Refused(
            f"expected_digest cannot be compared: no tensor of {what} came, or some came while no "
            "digests were asked for. Begin the session with received_digest=true"
        )
    wrong = [f"{rank}: {digest}" for rank, digest in received.items() if digest != expected]
    if wrong:
        raise Altered(
            f"expected_digest is {expected}, and the tensors of {what} came with another one: "
            f"{list_names(wrong)}"
        )


def _together(ranks: list[StagedChanges], why_in_place: str | None) -> StagedChanges:
    """Add up the changes of all ranks, and name the form of the rank that had to give way most."""
    most = max(ranks, key=lambda rank: len(rank.form))
    changed = sum(rank.changed_elements for rank in ranks)
    elements = sum(
        rank.changed_elements / rank.changed_fraction for rank in ranks if rank.changed_fraction
    )
    return StagedChanges(
        form=most.form,
        why=why_in_place or most.why,
        changed_elements=changed,
        changed_fraction=changed / elements if elements else 0.0,
        staging_bytes_peak=max(rank.staging_bytes_peak for rank in ranks),
    )


def write_receipt(committed: list[Committed], update: OpenUpdate | None) -> Receipt:
    """Write the receipt of a commit. ``update`` is None for a rollback."""
    message = "Rolled the weights back."
    if update is not None:
        message = "Succeeded to update model weights."
        if update.weight_version is not None:
            message += f" Weight version updated to {update.weight_version}."
    first = committed[0]
    received = update.received if update is not None else {}
    return Receipt(
        message=message,
        weight_version=first.weight_version,
        base_version=first.base_version,
        epoch=first.epoch,
        staged_s=update.staged_s if update is not None else 0.0,
        stall_ms=max(rank.stall_ms for rank in committed),
        held_s=max(rank.held_s for rank in committed),
        bytes=update.bytes if update is not None else 0,
        tensors=update.tensors if update is not None else 0,
        retracted=sum(rank.retracted for rank in committed),
        staged_as=update.staged_as if update is not None else None,
        quantized=dict(update.quantized) if update is not None else {},
        warnings=update.warnings if update is not None else (),
        ranks=tuple(
            RankReceipt(
                dp_rank=rank.dp_rank,
                tp_rank=rank.tp_rank,
                pp_rank=rank.pp_rank,
                digest=rank.digest,
                received_digest=received.get(rank_of(rank)),
            )
            for rank in committed
        ),
    )
