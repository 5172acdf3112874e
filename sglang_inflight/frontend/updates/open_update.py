"""The update that has its turn: what its calls asked for, to be done at the commit."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_inflight.errors import Conflict
from sglang_inflight.frontend.bodies import DiskBody, UpdateBody
from sglang_inflight.frontend.deadline import Deadline
from sglang_inflight.frontend.shared_call import SharedCall
from sglang_inflight.messages import (
    KVPolicy,
    OpenCall,
    SealCall,
    Selector,
    Source,
    StageCall,
    Staged,
)
from sglang_inflight.receipt import Receipt


class Phase(enum.Enum):
    """What an update does now, and so what may be asked of it.

    phase        meaning                                     moves to
    OPEN         takes in tensors                            SEALING, ENDED (dropped)
    SEALING      every rank checks it and votes; takes in    SEALED, ENDED (dropped)
                 nothing more
    SEALED       voted for; takes in nothing more            COMMITTING, ENDED (dropped)
    COMMITTING   the commit was sent, and cannot be called   ENDED
                 back
    ENDED        committed or dropped
    """

    OPEN = "open"
    SEALING = "sealing"
    SEALED = "sealed"
    COMMITTING = "committing"
    ENDED = "ended"


@dataclass
class OpenUpdate:
    """One call, or a session of many. Belongs to ``Updates`` and the front end's event loop."""

    id: str
    selector: Selector | None
    # called when the lease has run out
    expire: Callable[[OpenUpdate], None]
    is_session: bool = False
    # whether calls that name no session may be pieces of this one
    takes_unnamed: bool = False
    phase: Phase = Phase.OPEN
    weight_version: str | None = None
    kv_cache: KVPolicy | None = None
    torch_empty_cache: bool = False
    aborts_requests: bool = False
    staged_s: float = 0.0
    tensors: int = 0
    bytes: int = 0
    model_path: str | None = None
    load_format: str | None = None
    # whether the calls that brought tensors so far named the session; None before the first
    is_named: bool | None = None
    lease_s: float | None = None
    why_dropped: str | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    # each is done once, however many ask for it
    opening: SharedCall[None] = field(default_factory=SharedCall)
    sealing: SharedCall[None] = field(default_factory=SharedCall)
    ending: SharedCall[Receipt] = field(default_factory=SharedCall)
    _lease: asyncio.TimerHandle | None = None

    @property
    def kv_policy(self) -> KVPolicy:
        """That of the commit, as far as its calls have said by now."""
        return self.kv_cache or "fence"

    @property
    def is_droppable(self) -> bool:
        return self.phase not in (Phase.COMMITTING, Phase.ENDED)

    def is_foreign(self, body: UpdateBody) -> bool:
        """Whether a call is no piece of this session, but an update of its own.

        Upstream's clients name no session, so one that was begun in upstream's way takes
        whatever comes, but for what says how it stands to a session: ``on_busy``. A caller
        who names it is safe from others' calls, say one whose sender is long gone.
        """
        if body.session_id is not None:
            return False
        return not self.takes_unnamed or self.is_named is True or body.on_busy != "wait"

    def claim(self, body: UpdateBody) -> None:
        """Raises ``Conflict`` where a call names the session, and one before it did not."""
        if body.session_id is not None and self.is_named is False:
            raise Conflict(
                "a call that did not name this session sent weights into it, and may be "
                "anybody's: the session is dropped"
            )
        self.is_named = body.session_id is not None

    def note(self, body: UpdateBody) -> None:
        """The last version named wins; a cache once to be recomputed is recomputed."""
        self.weight_version = body.weight_version or self.weight_version
        self.torch_empty_cache |= body.torch_empty_cache
        self.aborts_requests |= body.abort_all_requests
        if self.kv_cache is None or body.kv_cache is not None or body.flush_cache:
            self.kv_cache = body.kv_policy
        if isinstance(body, DiskBody) and "draft" not in (body.selector, self.selector):
            self.model_path, self.load_format = body.model_path, body.load_format

    def renew_lease(self) -> None:
        """It runs out ``lease_s`` from now on; never where that is None."""
        self.end_lease()
        if self.lease_s is not None and self.phase is not Phase.ENDED:
            self._lease = asyncio.get_running_loop().call_later(self.lease_s, self.expire, self)

    def end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()

    def open_call(self, *, partial: bool, expected: str | None, deadline: Deadline) -> OpenCall:
        return OpenCall(
            update_id=self.id,
            selector=self.selector,
            partial=partial,
            expected_version=expected,
            timeout_s=deadline.seconds_left,
        )

    def stage_call(
        self, source: Source, selector: Selector | None, deadline: Deadline
    ) -> StageCall:
        return StageCall(
            update_id=self.id,
            source=source,
            selector=selector,
            timeout_s=deadline.seconds_left,
        )

    def count(self, staged: list[Staged]) -> None:
        """A rank may hold more bytes than another one; the slowest says how long it took."""
        self.staged_s += max(rank.staged_s for rank in staged)
        self.tensors += staged[0].tensors
        self.bytes += max(rank.bytes for rank in staged)

    def seal_call(self, deadline: Deadline) -> SealCall:
        return SealCall(update_id=self.id, timeout_s=deadline.seconds_left)
