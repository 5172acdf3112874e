"""Ranks and workers that answer when a unit test says so."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.platforms import current_platform

from sglang_inflight.frontend.pauses import Pauses
from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.frontend.updates.drain import NoRequestsRunning
from sglang_inflight.frontend.updates.groups import Groups
from sglang_inflight.frontend.updates.two_phase import TwoPhase
from sglang_inflight.frontend.updates.updates import Updates
from sglang_inflight.frontend.updates.version_record import VersionRecord
from sglang_inflight.messages import (
    A,
    Committed,
    ContinueCall,
    Done,
    Failed,
    InflightCall,
    Opened,
    PauseCall,
    Paused,
    RankAnswer,
    Resumed,
    SealCall,
    StageCall,
    Staged,
    StatusCall,
    TransferGivenUp,
    Voted,
)
from sglang_inflight.scheduler import requests
from sglang_inflight.scheduler.update.worker import Job
from sglang_inflight.settings import Settings
from sglang_inflight.topology import Rank
from sglang_inflight.vocabulary.answers import Capabilities, StagedChanges
from sglang_inflight.vocabulary.bodies import (
    TensorBody,
)
from sglang_inflight.vocabulary.errors import InflightError
from tests.support.ticks import until_idle

SESSION = "s"
# a server that can do everything
ALL = Capabilities()


# more rounds than there are updates in a play
ROUNDS = 10


WHOLE = {
    Done: Done(),
    Opened: Opened(in_place=False),
    Staged: Staged(staged_s=1.0, tensors=1, bytes=1),
    Voted: Voted(staged_s=1.0, staged_as=StagedChanges(form="device")),
    TransferGivenUp: TransferGivenUp(broken=True),
}


def committed(epoch: int) -> Committed:
    return Committed(
        weight_version=f"v{epoch}",
        base_version=f"v{epoch - 1}",
        epoch=epoch,
        stall_ms=1.0,
        retracted=0,
        digest="d",
    )


class ManualRank(Ranks):
    """One rank. The test decides when it answers, in the order of the calls."""

    def __init__(self) -> None:
        self.called: list[Any] = []
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self.epoch = 0
        self.heard_by: Callable[[RankAnswer], None]
        self.refuses_next = False
        self.refusable: tuple[type, ...] = (StageCall, SealCall)

    async def ask(self, call: InflightCall[A], timeout_s: float) -> list[A | Failed]:
        self.called.append(call)
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, answered))
        return [await answered]

    def answer(self) -> bool:
        """Answer all waiting calls. Return whether there were any."""
        waiting, self._waiting = self._waiting, []
        for call, answered in waiting:
            refused = self.refuses_next and isinstance(call, self.refusable)
            self.refuses_next = self.refuses_next and not refused
            answer = Failed(message="no", error="Refused") if refused else self._do(call)
            self.heard_by(answer)
            if not answered.done():
                answered.set_result(answer)
        return bool(waiting)

    def _do(self, call: Any) -> RankAnswer:
        if call.answer is not Committed:
            return WHOLE[call.answer]
        self.epoch += 1
        return committed(self.epoch)


class Play:
    """A front end with an open session, and the calls made to it."""

    def __init__(self, can: Capabilities = ALL) -> None:
        # the version after each commit and rollback
        self.published: list[str] = []
        self.manager: Any = SimpleNamespace(
            asyncio_tasks=set(),
            mm_processor=None,
            config_value=lambda name: "v0",
            abort_request=lambda abort_all: None,
            _update_weight_version_if_provided=self.published.append,
        )
        manager: Any = self.manager
        self.ranks = ManualRank()
        record = VersionRecord(manager, Rank(0, 0, 0))
        self.ranks.heard_by = record.take_answer
        self.two_phase = TwoPhase(manager, self.ranks, record, METRICS, can)
        self.groups, idle = (
            Groups(self.ranks, SETTINGS),
            NoRequestsRunning(manager, NO_PAUSES, can),
        )
        self.updates: Updates = Updates(manager, self.two_phase, self.groups, idle, SETTINGS, can)
        self.background = manager.asyncio_tasks
        self.made: list[asyncio.Future[Any]] = []
        self.left: list[asyncio.Future[Any]] = []

    def make(self, call: Awaitable[Any]) -> None:
        self.made.append(asyncio.ensure_future(call))

    def piece(self, **fields: Any) -> TensorBody:
        return TensorBody(
            serialized_named_tensors=[b""], non_blocking=True, kv_cache="fence", **fields
        )

    def lapse(self) -> None:
        if self.two_phase.current is not None:
            self.two_phase.expire(self.two_phase.current)

    def leave(self) -> None:
        """Cancel the last waiting call."""
        waiting = [call for call in self.made if not call.done()]
        if waiting:
            waiting[-1].cancel()
            self.left.append(waiting[-1])

    def refuse(self) -> None:
        self.ranks.refuses_next = True

    async def settle(self) -> None:
        await until_idle()

    async def finish(self) -> None:
        """Answer all calls, and let sessions without an end expire."""
        for _ in range(ROUNDS):
            while self.ranks.answer():
                await self.settle()
            if all(call.done() for call in (*self.made, *self.background)):
                return
            self.lapse()
            await self.settle()
        raise AssertionError("a call or a background task never ends")


SETTINGS = Settings.from_environment()


METRICS: Any = SimpleNamespace(
    updates=SimpleNamespace(labels=lambda result: SimpleNamespace(inc=lambda: None))
)


NO_PAUSES: Any = None


class PausingRank(Ranks):
    """A rank in a long step. ``step`` ends it and carries the calls out."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.takes = 0
        self._told: list[tuple[Any, asyncio.Future[Any]]] = []

    async def ask(self, call: InflightCall[A], timeout_s: float) -> list[A | Failed]:
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._told.append((call, answered))
        return [await answered]

    def step(self) -> None:
        told, self._told = self._told, []
        for call, answered in told:
            answer = self._do(call)
            if not answered.done():
                answered.set_result(answer)

    def _do(self, call: Any) -> Any:
        match call:
            case PauseCall(pause_id=pause_id):
                self.takes += 1
                self.held = [pause_id]
                return Paused(mode=call.mode, running=0, waiting=0, retracted=0, aborted=0)
            case ContinueCall():
                self.held = []
                return Resumed(paused=False)
            case StatusCall():
                return SimpleNamespace(pause=SimpleNamespace(paused=bool(self.held)))
        raise AssertionError(call)


def pauses_of(rank: PausingRank) -> Pauses:
    manager: Any = SimpleNamespace(
        gracefully_exit=False, is_pause=False, config_value=lambda name: "v0"
    )
    metric = SimpleNamespace(observe=lambda value: None)
    metrics: Any = SimpleNamespace(pause_grant=SimpleNamespace(labels=lambda mode: metric))
    return Pauses(manager, rank, metrics, ALL, lease_s=None)


class ManualWorker:
    """A staging thread that runs its jobs when the test calls ``work``."""

    def __init__(self) -> None:
        self._jobs: list[Job[Any]] = []
        self.failed: list[str] = []

    def submit(self, call: InflightCall[Any], job: Job[Any]) -> None:
        self._jobs.append(job)

    def do(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)

    def work(self) -> None:
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            try:
                job()
            except InflightError as error:
                self.failed.append(str(error))


def name_device_as_trainers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the platform of this process name a CPU as the reference platform does."""
    monkeypatch.setattr(
        type(current_platform), "get_device_uuid", lambda self, device=0: platform.machine()
    )


class QueuedRequest:
    """An unfinished request of a scheduler."""

    def __init__(self, *, row: int | None = None) -> None:
        self.kv = SimpleNamespace(holds_kv=row is not None, kv_committed_len=0)
        self.is_retracted = False
        self.beam_group = None

    def finished(self) -> bool:
        return False


def full_scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a scheduler with one request in every place."""
    monkeypatch.setattr(requests, "get_parallel", lambda: SimpleNamespace(pp_size=1))
    staged = SimpleNamespace(req="backed up by HiSparse")

    def batch(name: str) -> Any:
        return SimpleNamespace(reqs=[name])

    return SimpleNamespace(
        _collect_inflight_batches=lambda: [batch("running"), None],
        cur_batch_for_debug=batch("current"),
        result_queue=[(batch("launched"), None)],
        waiting_queue=["waiting"],
        grammar_manager=SimpleNamespace(grammar_queue=["waiting for its grammar"]),
        dllm_manager=SimpleNamespace(waiting_queue=["between two diffusions"]),
        chunked_req="chunked",
        hisparse_coordinator=SimpleNamespace(ack_staging_queue=[staged]),
        disaggregation_mode=DisaggregationMode.NULL,
    )


def uncounted() -> Any:
    """Return ``Metrics`` for jobs, which counts nothing."""
    counter = SimpleNamespace(inc=lambda count: None, set=lambda value: None)
    return SimpleNamespace(
        counter=lambda name, help: counter,
        counters=lambda name, help, label: lambda value: counter,
        gauges=lambda name, help, label: lambda value: counter,
        observe_load=lambda source, seconds: None,
        observe_changes=lambda staged_as: None,
        observe_audit=lambda audited, different: None,
        staged_bytes=counter,
    )
