"""The table of staging's states, and that staging keeps to it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from sglang_inflight.errors import Conflict, InflightError
from sglang_inflight.messages import (
    DiskSource,
    Done,
    DropCall,
    InflightCall,
    OpenCall,
    SealCall,
    StageCall,
    Staged,
    Voted,
)
from sglang_inflight.scheduler.update import staging_state
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.staging import Staging
from sglang_inflight.scheduler.update.staging_state import MOVES, StagingState, Step
from sglang_inflight.scheduler.update.swap import PreparedSwap, swap_for
from sglang_inflight.scheduler.update.update import Sealed, Update
from sglang_inflight.scheduler.update.worker import Job

EMPTY, OPEN, SEALED = StagingState


class LaterWorker:
    """A staging thread that gets to its jobs when the test says so."""

    def __init__(self) -> None:
        self._jobs: list[Job[Any]] = []
        self.failed: list[str] = []

    def submit(self, call: InflightCall[Any], job: Job[Any]) -> None:
        self._jobs.append(job)

    def work(self) -> None:
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            try:
                job()
            except InflightError as error:
                self.failed.append(str(error))


class NoModel:
    """Jobs where there is nothing to load."""

    def prepare(self, update: Update, selector: None, *, after: Any) -> Done:
        return Done()

    def fill(self, update: Update, source: Any, selector: None) -> Staged:
        return Staged(staged_s=0.0, tensors=1, bytes=1)

    def seal(self, update: Update, base_digest: str | None) -> Voted:
        if base_digest is None:
            update.base_digest = "old"
        pair = torch.zeros(1), torch.ones(1)
        update.sealed = Sealed("new", PreparedSwap(swap_for(torch.device("cpu")), (pair,)), ())
        return Voted(staged_s=0.0)

    def let_go(self) -> None:
        """Nobody has sent anything."""


class OneRank:
    def __init__(self) -> None:
        scheduler: Any = type("OnCPU", (), {"device": "cpu"})()
        jobs: Any = NoModel()
        none: Any = None
        self.worker = LaterWorker()
        self.live = LiveWeights(scheduler)
        self.staging = Staging(
            jobs,
            self.worker,
            none,
            self.live,
            none,
            mode=StagingMode.DEVICE,
            refusal=None,
            why_not_staged=None,
        )

    def do(self, step: Step, update_id: str = "u") -> None:
        """Raises ``Conflict`` where it is refused."""
        fields: dict[str, Any] = {"call_id": "", "update_id": update_id}
        timed = fields | {"timeout_s": 60.0}
        match step:
            case Step.OPEN:
                self.staging.open(OpenCall(**timed, partial=True), current_version="v0")
            case Step.STAGE:
                self.staging.stage(StageCall(**timed, source=DiskSource(model_path="")))
            case Step.SEAL:
                self.staging.seal(SealCall(**timed))
            case Step.VOTED:
                self.staging.seal(SealCall(**timed))
                self.worker.work()
            case Step.DROP:
                self.staging.drop(DropCall(**fields, reason="by hand"))
            case Step.COMMIT:
                sealed = self.staging.take(update_id)
                self.live.swap_in(sealed.digest, sealed.swap, base_version="v0")

    def reach(self, state: StagingState) -> None:
        for step in {EMPTY: [], OPEN: [Step.OPEN], SEALED: [Step.OPEN, Step.VOTED]}[state]:
            self.do(step)
        assert self.staging.state is state


def test_the_table_is_the_machine() -> None:
    assert staging_state.__doc__ is not None
    rows = re.findall(r"^    (\w+) +(\w+) +(\w+) +(\w+)$", staging_state.__doc__, re.MULTILINE)
    assert rows[0] == ("step", "EMPTY", "OPEN", "SEALED")
    table = {
        (Step(row), state): StagingState[cell]
        for row, *cells in rows[1:]
        for state, cell in zip(StagingState, cells, strict=True)
        if cell != "refused"
    }
    assert table == MOVES


@pytest.mark.parametrize("state", StagingState)
@pytest.mark.parametrize("step", Step)
def test_staging_keeps_to_it(step: Step, state: StagingState) -> None:
    rank = OneRank()
    rank.reach(state)
    after = MOVES.get((step, state))
    if after is None:
        with pytest.raises(Conflict):
            rank.do(step)
        assert rank.staging.state is state
    else:
        rank.do(step)
        assert rank.staging.state is after


@pytest.mark.parametrize("state", [OPEN, SEALED])
@pytest.mark.parametrize("step", [Step.OPEN, Step.STAGE, Step.SEAL, Step.COMMIT, Step.DROP])
def test_another_update_moves_nothing(step: Step, state: StagingState) -> None:
    rank = OneRank()
    rank.reach(state)
    if step is Step.DROP:
        rank.do(step, "another")
    else:
        with pytest.raises(Conflict):
            rank.do(step, "another")
    assert rank.staging.state is state


def test_what_is_dropped_is_not_sealed_later() -> None:
    """Its job runs when the update is forgotten, and perhaps the next one is open."""
    rank = OneRank()
    rank.reach(OPEN)
    rank.do(Step.SEAL)
    rank.do(Step.DROP)
    rank.do(Step.OPEN, "next")
    rank.worker.work()
    assert rank.worker.failed == ["the update was dropped: by hand"] * 2
    assert rank.staging.state is OPEN


def test_what_can_be_rolled_back() -> None:
    rank = OneRank()
    assert rank.staging.why_no_rollback() is not None
    rank.reach(SEALED)
    rank.do(Step.COMMIT)
    assert rank.staging.why_no_rollback() is None
    previous = rank.live.previous
    assert previous is not None
    assert (previous.version, previous.digest, rank.live.digest) == ("v0", "old", "new")
    # the next one is staged over it, and a drop does not bring it back
    rank.do(Step.OPEN)
    assert rank.staging.why_no_rollback() == "an update is being staged over it"
    rank.do(Step.DROP)
    assert rank.staging.why_no_rollback() is not None


def test_a_drop_leaves_nothing_known() -> None:
    """That the weights were read through for it is no change that a caller should see."""
    rank = OneRank()
    rank.reach(SEALED)
    rank.do(Step.DROP)
    assert rank.live.digest is None
