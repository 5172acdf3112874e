"""The front end's own objects over one imaginary rank, without a server, tick by tick.

The rank acts some ticks after a message was sent, even if no caller waits for the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight.extensions.memory.front_end import Memory
from sglang_inflight.extensions.memory.messages import (
    CancelReleaseCall,
    Moved,
    PrepareReleaseCall,
    PrepareResumeCall,
    ReleaseCall,
    ResumeCall,
)
from sglang_inflight.frontend.aio import Lifetime
from sglang_inflight.frontend.handlers import direct_handlers
from sglang_inflight.frontend.pauses import Pauses
from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.frontend.updates.drain import NoRequestsRunning
from sglang_inflight.frontend.updates.groups import Groups
from sglang_inflight.frontend.updates.two_phase import TwoPhase
from sglang_inflight.frontend.updates.updates import Updates
from sglang_inflight.frontend.updates.version_record import VersionRecord
from sglang_inflight.messages import (
    CommitCall,
    Committed,
    ContinueCall,
    Described,
    Done,
    DropCall,
    Failed,
    GiveUpTransferCall,
    JoinGroupCall,
    LeaveGroupCall,
    OpenCall,
    Opened,
    PauseCall,
    Paused,
    RankAnswer,
    RenameCall,
    Resumed,
    RollbackCall,
    SealCall,
    StageCall,
    Staged,
    StatusCall,
    TransferGivenUp,
    Voted,
)
from sglang_inflight.scheduler.pause.machine import (
    Asked,
    Continued,
    Drained,
    Event,
    Grant,
    HeldPauses,
    MemoryAway,
    MemoryBack,
    PauseState,
    Refuse,
    Released,
    transition,
)
from sglang_inflight.settings import Settings
from sglang_inflight.topology import Rank
from sglang_inflight.vocabulary.answers import (
    MEMORY,
    Capabilities,
    MemoryStatus,
    PauseStatus,
    StagedChanges,
    StagingStatus,
    WeightsStatus,
)
from sglang_inflight.vocabulary.bodies import Body
from sglang_inflight.vocabulary.calls import TABLE

FIRST = Rank(0, 0, 0)
# type of a body -> its call; GETs share one
NAMES = {call.body: call.name for call in TABLE.values()}
NO_STATUS: Any = None
SETTINGS = Settings.from_environment()


class OneRank:
    """One rank's behaviour for each call, in order."""

    def __init__(self) -> None:
        self.pauses = HeldPauses()
        self.update_id: str | None = None
        self.is_sealed = False
        self.version = "v0"
        self.previous: str | None = None
        self.epoch = 0
        self.is_released = False
        # scale of its next vote
        self.kv_scale: str | None = None
        self.groups: dict[str, str] = {}
        self.told: list[Any] = []

    @property
    def holders(self) -> list[str]:
        return [holder.pause_id for holder in self.pauses.holders]

    @property
    def is_paused(self) -> bool:
        return self.pauses.state is not PauseState.RUNNING

    def take(self, call: Any) -> list[RankAnswer]:
        """Return the answers to this call, and to earlier calls still waiting."""
        self.told.append(call)
        match call:
            case PauseCall():
                return [*self._see(Asked(call, 0.0)), *self._drain()]
            case ContinueCall():
                return self._see(Continued(call))
            case _:
                answer = self._do(call)
                answer.call_id = call.call_id
                return [answer]

    def _do(self, call: Any) -> RankAnswer:
        match call:
            case OpenCall(update_id=update_id):
                if self.update_id is not None:
                    return conflict("another weight update is open")
                if call.expected_version not in (None, self.version):
                    return conflict(f"{self.version!r} is serving")
                self.update_id, self.is_sealed = update_id, False
                return Opened(in_place=False)
            case StageCall() | SealCall() | CommitCall() if call.update_id != self.update_id:
                return conflict(f"no weight update {call.update_id!r} is open")
            case StageCall():
                return Staged(staged_s=0.0, tensors=1, bytes=1)
            case SealCall():
                self.is_sealed = True
                staged_as = StagedChanges(form="device")
                return Voted(staged_s=0.0, staged_as=staged_as, kv_scale=self.kv_scale)
            case DropCall(update_id=update_id):
                if self.update_id == update_id:
                    self.update_id = None
                return Done()
            case CommitCall():
                assert self.is_sealed
                self.update_id = None
                return self._go_live(call.weight_version or self.version)
            case RollbackCall():
                return self._go_live(self.previous or self.version)
            case RenameCall():
                self.version = call.weight_version
                return self._describe()
            case StatusCall():
                return self._describe()
            case PrepareReleaseCall():
                if self.update_id is not None or MEMORY in self.holders:
                    return conflict("an update is open, or memory is released")
                self._see(MemoryAway("weights are released"))
                return Done()
            case CancelReleaseCall():
                if not self.is_released:
                    self._see(MemoryBack())
                return Done()
            case ReleaseCall():
                self.is_released = True
                return self._moved()
            case PrepareResumeCall():
                return Done() if self.is_released else conflict("memory is not released")
            case ResumeCall():
                self.is_released = False
                self._see(MemoryBack())
                return self._moved()
            case JoinGroupCall(group_name=name):
                self.groups[name] = call.call_id
                return Done()
            case LeaveGroupCall(group_name=name, join_id=join_id):
                if join_id in (None, self.groups.get(name)):
                    self.groups.pop(name, None)
                return Done()
            case GiveUpTransferCall():
                return TransferGivenUp(broken=False)
        return Done()

    def _go_live(self, version: str) -> Committed:
        base, self.previous, self.version = self.version, self.version, version
        self.epoch += 1
        return Committed(
            weight_version=version, base_version=base, epoch=self.epoch, stall_ms=0.0,
            retracted=0, digest="d",
        )  # fmt: skip

    def _moved(self) -> Moved:
        return Moved(bytes={}, seconds=0.0, paused=self.is_paused, hollow=None)

    def _drain(self) -> list[RankAnswer]:
        return self._see(Drained(0.0)) if self.pauses.state is PauseState.DRAINING else []

    def _see(self, event: Event) -> list[RankAnswer]:
        done = transition(self.pauses, event)
        self.pauses = done.pauses
        answers: list[RankAnswer] = []
        for reply in done.replies:
            match reply:
                case Grant(call):
                    mode = self.pauses.mode if self.is_paused else None
                    said: RankAnswer = Paused(
                        mode=mode, running=0, waiting=0, retracted=0, aborted=0
                    )
                case Released(call):
                    said = Resumed(paused=self.is_paused)
                case Refuse(call, why):
                    said = conflict(why)
                case _:
                    continue
            said.call_id = call.call_id
            answers.append(said)
        return answers

    def _describe(self) -> Described:
        return Described(
            capabilities=Capabilities(),
            pause=PauseStatus(
                state=self.pauses.state.value, paused=self.is_paused, mode=self.pauses.mode,
                holders=(), running=0, waiting=0,
            ),
            weights=WeightsStatus(
                weight_version=self.version, epoch=self.epoch, digest=None, previous_version=None
            ),
            staging=StagingStatus(
                mode="device", state="empty", update_id=self.update_id, tensors=0, bytes=0,
                can_roll_back=True, dirty=None, refusal=None, groups={},
            ),
            memory=MemoryStatus(),
        )  # fmt: skip


def conflict(why: str) -> Failed:
    return Failed(message=why, error="Conflict")


class Manager:
    """A minimal ``TokenizerManager``. ``delay`` is the rank's, in ticks."""

    def __init__(self, rank: OneRank, delay: int) -> None:
        self.asyncio_tasks: set[asyncio.Future[Any]] = set()
        self.event_loop = asyncio.get_running_loop()
        self.mm_processor = None
        self.gracefully_exit = False
        self.is_pause = False
        self.model_path = "at the start"
        self.take_answer: Callable[[RankAnswer], None]
        self.sent: list[Any] = []
        self._config = {"weight_version": rank.version, "load_format": "auto"}
        self._rank = rank
        self._delay = delay

    def config_value(self, name: str) -> Any:
        return self._config[name]

    def record_config_updates(self, source: str, **fields: Any) -> None:
        self._config |= fields

    def _update_weight_version_if_provided(self, weight_version: str) -> None:
        self.record_config_updates("", weight_version=weight_version)

    def auto_create_handle_loop(self) -> None: ...

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None: ...

    async def _async_dispatch_to_scheduler(self, call: Any) -> None:
        self.sent.append(call)
        self._arrive(call, self._delay)

    def _arrive(self, call: Any, ticks: int) -> None:
        if ticks:
            self.event_loop.call_soon(self._arrive, call, ticks - 1)
            return
        for answer in self._rank.take(call):
            self.take_answer(answer)


class FrontEnd:
    """The objects of a ``Frontend``, without adapters and HTTP."""

    def __init__(
        self, *, delay: int = 0, transparent: bool = False, settings: Settings = SETTINGS
    ) -> None:
        self.rank = OneRank()
        can = Capabilities()
        manager: Any = Manager(self.rank, delay)
        self.manager = manager
        self.lifetime = Lifetime(manager)
        self.ranks = Ranks(manager, self.lifetime)
        metric = SimpleNamespace(inc=lambda: None, observe=lambda value: None)
        labelled = SimpleNamespace(labels=lambda *_: metric)
        metrics: Any = SimpleNamespace(updates=labelled, pause_grant=labelled)
        self.record = VersionRecord(manager, FIRST)
        self.pauses = Pauses(manager, self.ranks, metrics, can, lease_s=settings.pause_lease_s)
        self.two_phase = TwoPhase(manager, self.ranks, self.record, metrics, can)
        self.memory = Memory(manager, self.ranks, self.pauses, self.two_phase, can)
        self.groups = Groups(self.ranks, settings)
        idle = NoRequestsRunning(manager, self.pauses, can)
        self.updates = Updates(manager, self.two_phase, self.groups, idle, settings, can)
        self.handlers = direct_handlers(
            manager,
            self.pauses,
            self.updates,
            self.groups,
            ask_status=NO_STATUS,
        ).with_more(
            {
                "release_memory_occupation": self.memory.release,
                "resume_memory_occupation": self.memory.resume,
            }
        )
        if transparent:
            # not at the top: the core's tests have no extension
            from sglang_inflight.extensions.transparent.windows import Transparent

            self.handlers = Transparent(
                self.handlers,
                manager,
                self.pauses,
                self.updates,
                self.groups,
                settings,
                can,
                grace_s=30.0,
                in_background=self.in_background,
            ).handlers
        manager.take_answer = self._take_answer

    def in_background(self, doing: Coroutine[Any, Any, Any]) -> None:
        self.manager.asyncio_tasks.add(asyncio.ensure_future(doing))

    def _take_answer(self, answer: RankAnswer) -> None:
        self.record.take_answer(answer)
        self.pauses.take_answer(answer)
        self.ranks.take_answer(answer)

    def call(self, body: Body) -> Coroutine[Any, Any, Any]:
        """Make the call of this body's type."""
        return self.handlers[NAMES[type(body)]](body)

    async def ask(self, call: Awaitable[Any]) -> Any:
        """Await the call like a route: it fails once the ranks are shut down."""
        return await self.lifetime.unless_shut_down(call)


@pytest.fixture
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the checks of server arguments: there are none here."""
    front = "sglang_inflight.frontend"
    disagg = SimpleNamespace(disaggregation_mode="null")
    monkeypatch.setattr(f"{front}.updates.drain.get_disagg", lambda: disagg)
    no_store = SimpleNamespace(hicache_storage_backend=None)
    monkeypatch.setattr("sglang_inflight.capabilities.get_memory", lambda: no_store)
    monkeypatch.setattr(f"{front}.ranks.all_ranks", lambda: frozenset({FIRST}))
