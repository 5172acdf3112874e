"""A cancelled join removes no other group of its name. The groups are real."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.runtime_context import get_parallel

from harness.server import free_port
from sglang_inflight.client.trainer_group import TrainerGroup
from sglang_inflight.frontend.aio import Lifetime
from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.frontend.updates.groups import Groups as FrontendGroups
from sglang_inflight.messages import JoinGroupCall, LeaveGroupCall
from sglang_inflight.scheduler.groups import groups
from sglang_inflight.scheduler.groups.groups import Groups
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.staging import Staging
from sglang_inflight.settings import Settings
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.bodies import JoinGroupBody
from sglang_inflight.vocabulary.errors import Refused
from tests.unit.fakes import ManualWorker

NAME = "g"
PATIENCE_S = 60.0
ONE = {"pp_size": 1, "tp_size": 1, "dp_size": 1, "pp_rank": 0, "tp_rank": 0, "dp_rank": 0}


class Answers:
    """Answers by call id. None is a success."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[tuple[str, Exception | None]] = queue.SimpleQueue()

    def succeed(self, call: Any, answer: Any) -> None:
        self._said.put((call.call_id, None))

    def fail(self, call: Any, error: Exception) -> None:
        self._said.put((call.call_id, error))

    def next(self) -> tuple[str, Exception | None]:
        return self._said.get(timeout=PATIENCE_S)


class OneRank:
    """A rank whose staging thread runs when the test calls ``worker.work``."""

    def __init__(self) -> None:
        scheduler: Any = SimpleNamespace(device="cpu")
        answers: Any
        self.answers = answers = Answers()
        none: Any = None
        self.worker = ManualWorker()
        self.groups = Groups(PATIENCE_S, torch.device("cpu"))
        self.staging = Staging(
            none,
            self.worker,
            self.groups,
            LiveWeights(scheduler),
            answers,
            kv_tokens={},
            mode=StagingMode.DEVICE,
            can=Capabilities(),
            expect_no_step=lambda: None,
            prepare_to_hold=lambda: None,
            post_ahead=lambda source: None,
        )

    def join(self, call_id: str, port: int) -> None:
        call = JoinGroupCall(
            call_id=call_id,
            master_address="127.0.0.1",
            master_port=port,
            rank_offset=1,
            world_size=2,
            group_name=NAME,
            backend="gloo",
        )
        self.staging.join_group(call)

    def give_up(self, call_id: str) -> None:
        self.staging.leave_group(LeaveGroupCall(group_name=NAME, join_id=call_id))

    def leave(self) -> None:
        self.staging.leave_group(LeaveGroupCall(group_name=NAME))
        self.worker.work()


@pytest.fixture
def rank() -> Iterator[OneRank]:
    with get_parallel().override(**ONE, attn_dp_enabled=False):
        yield (rank := OneRank())
        rank.worker.work()
        with contextlib.suppress(Refused):
            rank.groups.leave(NAME)


@pytest.fixture
def trainer() -> Iterator[TrainerGroup]:
    yield (trainer := TrainerGroup(NAME, 1, backend="gloo", timeout_s=PATIENCE_S))
    trainer.leave()


def expect_broadcast(rank: OneRank, trainer: TrainerGroup) -> None:
    is_sent = trainer.broadcast(torch.tensor([7.0]))
    tensor = torch.zeros(1)
    rank.groups.get(NAME).receive(tensor, check=lambda: None)
    assert tensor.tolist() == [7]
    while not is_sent():
        pass


def test_join_after_a_cancelled_join_forms_its_group(rank: OneRank, trainer: TrainerGroup) -> None:
    rank.join("first", free_port())
    rank.give_up("first")
    assert rank.answers.next()[0] == "first"
    formed = trainer.form()
    rank.join("second", trainer.port)
    assert rank.answers.next() == ("second", None)
    formed.result()
    rank.worker.work()
    expect_broadcast(rank, trainer)
    rank.leave()
    assert rank.groups.describe() == {}


def test_cancelled_join_keeps_existing_group(
    rank: OneRank, trainer: TrainerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    formed = trainer.form()
    rank.join("first", trainer.port)
    assert rank.answers.next() == ("first", None)
    formed.result()

    asked, may_answer = queue.SimpleQueue[None](), queue.SimpleQueue[None]()
    is_of_use = groups.Group.is_of_use

    def ask(group: groups.Group) -> bool:
        asked.put(None)
        may_answer.get(timeout=PATIENCE_S)
        return is_of_use(group)

    monkeypatch.setattr(groups.Group, "is_of_use", ask)
    rank.join("second", free_port())
    asked.get(timeout=PATIENCE_S)
    rank.give_up("second")
    assert rank.answers.next()[0] == "second"
    rank.worker.work()
    may_answer.put(None)
    expect_broadcast(rank, trainer)


def test_cancelled_join_keeps_newer_rendezvous(rank: OneRank, trainer: TrainerGroup) -> None:
    rank.join("first", free_port())
    rank.join("second", trainer.port)
    assert rank.answers.next()[0] == "first"
    rank.give_up("first")
    formed = trainer.form()
    assert rank.answers.next() == ("second", None)
    formed.result()
    rank.worker.work()
    expect_broadcast(rank, trainer)


def test_cancelled_join_leaves_its_formed_group(rank: OneRank, trainer: TrainerGroup) -> None:
    """The answer came after the caller had left."""
    formed = trainer.form()
    rank.join("first", trainer.port)
    assert rank.answers.next() == ("first", None)
    formed.result()
    rank.give_up("first")
    rank.worker.work()
    assert rank.groups.describe() == {}


def test_cancelled_join_sends_leave_with_its_id() -> None:
    async def play() -> None:
        sent: asyncio.Queue[Any] = asyncio.Queue()
        manager: Any = SimpleNamespace(
            auto_create_handle_loop=lambda: None, _async_dispatch_to_scheduler=sent.put
        )
        ranks = Ranks(manager, Lifetime(manager))
        body = JoinGroupBody(
            master_address="127.0.0.1",
            master_port=1,
            rank_offset=1,
            world_size=2,
            group_name=NAME,
            backend="gloo",
        )
        joining = asyncio.create_task(FrontendGroups(ranks, Settings.from_environment()).join(body))
        join = await sent.get()
        joining.cancel()
        leave = await sent.get()
        assert (type(leave), leave.join_id) == (LeaveGroupCall, join.call_id)
        joining.cancel()
        await asyncio.wait({joining})

    with get_parallel().override(**ONE, attn_dp_enabled=False):
        asyncio.run(play())
