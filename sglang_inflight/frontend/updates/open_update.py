"""The update that has its turn: what its calls asked for, to be done at the commit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_inflight.errors import Conflict, Dropped
from sglang_inflight.frontend.deadline import Deadline
from sglang_inflight.frontend.shared_call import SharedCall
from sglang_inflight.frontend.updates.phase import Event, Phase, follow
from sglang_inflight.frontend.updates.wanted import Ending, Opening, Wanted
from sglang_inflight.messages import (
    DiskSource,
    IPCSource,
    KVPolicy,
    OpenCall,
    SealCall,
    StageCall,
    Staged,
    Voted,
)
from sglang_inflight.receipt import Receipt


@dataclass
class OpenUpdate:
    """One call, or a session of many. Belongs to ``Updates`` and the front end's event loop."""

    opening: Opening
    # called when the lease has run out
    expire: Callable[[OpenUpdate], None]
    phase: Phase = Phase.OPEN
    weight_version: str | None = None
    kv_cache: KVPolicy | None = None
    torch_empty_cache: bool = False
    aborts_requests: bool = False
    # ranks write the live weights, and hold requests from then on
    in_place: bool = False
    staged_s: float = 0.0
    tensors: int = 0
    bytes: int = 0
    # what is served then, where it came from disk
    checkpoint: DiskSource | None = None
    is_of_checkpoint_engine: bool = False
    # whether the calls that brought tensors so far named the session; None before the first
    is_named: bool | None = None
    lease_s: float | None = None
    why_dropped: str | None = None
    # of time.monotonic()
    dropped_at: float = 0.0
    over: asyncio.Event = field(default_factory=asyncio.Event)
    # each is done once, however many ask for it
    being_opened: SharedCall[None] = field(default_factory=SharedCall)
    being_sealed: SharedCall[None] = field(default_factory=SharedCall)
    being_ended: SharedCall[Receipt] = field(default_factory=SharedCall)
    # from the moment that the commit is sent: whoever has asked for it, it is carried through
    committing: asyncio.Future[Receipt] | None = None
    _lease: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.lease_s = self.opening.lease_s

    @property
    def id(self) -> str:
        return self.opening.id

    @property
    def kv_policy(self) -> KVPolicy:
        """That of the commit, as far as its calls have said by now."""
        return self.kv_cache or "fence"

    # ---- phases --------------------------------------------------------------------

    def allows(self, event: Event) -> bool:
        return follow(self.phase, event) is not None

    def move(self, event: Event) -> None:
        """Raises ``Dropped`` where it was dropped while something was waited for."""
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
        """Raises ``Dropped`` where it was dropped while something was waited for."""
        if self.phase is Phase.DROPPED:
            raise Dropped(f"the update was dropped before its commit: {self.why_dropped}")

    # ---- what its calls ask for ----------------------------------------------------

    def is_foreign(self, wanted: Wanted) -> bool:
        """Whether a call is no piece of this session, but an update of its own.

        Upstream's clients name no session, so one that was begun in upstream's way takes
        whatever comes, but for what says how it stands to a session: ``on_busy``. A caller
        who names it is safe from others' calls, say one whose sender is long gone.
        """
        if wanted.session_id is not None:
            return False
        return not self.takes_unnamed or wanted.on_busy != "wait"

    @property
    def takes_unnamed(self) -> bool:
        """Whether a call that names no session may be a piece of it."""
        return self.opening.takes_unnamed and self.is_named is not True

    def claim(self, wanted: Wanted) -> None:
        """Raises ``Conflict`` where a call names the session, and one before it did not."""
        if wanted.session_id is not None and self.is_named is False:
            raise Conflict(
                "a call that did not name this session sent weights into it, and may be "
                "anybody's: the session is dropped"
            )
        self.is_named = wanted.session_id is not None

    def add(self, wanted: Wanted) -> None:
        """The last version named wins; a cache once to be recomputed is recomputed."""
        self.weight_version = wanted.weight_version or self.weight_version
        self.torch_empty_cache |= wanted.torch_empty_cache
        self.aborts_requests |= wanted.aborts_requests
        if self.kv_cache is None or wanted.kv_policy_is_explicit:
            self.kv_cache = wanted.kv_policy
        of_draft = "draft" in (wanted.selector, self.opening.selector)
        if isinstance(wanted.source, DiskSource) and not of_draft:
            self.checkpoint = wanted.source
        self.is_of_checkpoint_engine |= isinstance(wanted.source, IPCSource)

    def finish(self, ending: Ending) -> None:
        """The end of a session has the last word."""
        self.kv_cache = ending.kv_policy or self.kv_policy
        self.weight_version = ending.weight_version or self.weight_version
        self.torch_empty_cache |= ending.torch_empty_cache

    # ---- what its ranks answer -----------------------------------------------------

    def count(self, staged: list[Staged]) -> None:
        """A rank may hold more bytes than another one, and the slowest is waited for."""
        self.staged_s += max(rank.staged_s for rank in staged)
        self.tensors += staged[0].tensors
        self.bytes += max(rank.bytes for rank in staged)

    def count_votes(self, votes: list[Voted]) -> None:
        self.staged_s += max(rank.staged_s for rank in votes)

    # ---- its lease -----------------------------------------------------------------

    def renew_lease(self) -> None:
        """It runs out ``lease_s`` from now on; never where that is None."""
        self._end_lease()
        if self.lease_s is not None and not self.over.is_set():
            self._lease = asyncio.get_running_loop().call_later(self.lease_s, self.expire, self)

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()

    # ---- messages ------------------------------------------------------------------

    def open_call(self, deadline: Deadline) -> OpenCall:
        return OpenCall(
            update_id=self.id,
            selector=self.opening.selector,
            partial=self.opening.partial,
            expected_version=self.opening.expected_version,
            may_be_empty=self.opening.takes_unnamed,
            timeout_s=deadline.seconds_left,
        )

    def stage_call(self, wanted: Wanted) -> StageCall:
        return StageCall(
            update_id=self.id,
            source=wanted.source,
            selector=wanted.selector,
            timeout_s=wanted.deadline.seconds_left,
        )

    def seal_call(self, deadline: Deadline) -> SealCall:
        return SealCall(update_id=self.id, timeout_s=deadline.seconds_left)
