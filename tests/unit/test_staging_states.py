"""The table of staging states, and staging's transitions."""

from __future__ import annotations

import re
import threading
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_inflight.extensions.memory.messages import PrepareReleaseCall
from sglang_inflight.messages import (
    DiskSource,
    Done,
    DropCall,
    InflightCall,
    OpenCall,
    SealCall,
    StageCall,
    Staged,
    TensorSource,
    Voted,
)
from sglang_inflight.scheduler.update import staging
from sglang_inflight.scheduler.update.live_machine import Empty
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.sources.call_layouts import CallLayouts
from sglang_inflight.scheduler.update.staging import MOVES, Staging, StagingState, Step
from sglang_inflight.scheduler.update.swap import PreparedSwap, swap_for
from sglang_inflight.scheduler.update.update import Names, Sealed, Update
from sglang_inflight.scheduler.update.worker import Job
from sglang_inflight.vocabulary.answers import Capabilities, StagedChanges
from sglang_inflight.vocabulary.errors import Conflict, Refused
from sglang_inflight.vocabulary.labels import VersionLabel
from tests.unit.fakes import ManualWorker

EMPTY, OPEN, SEALED = StagingState


class ImmediateWorker(ManualWorker):
    """A staging thread that runs each job at once."""

    def submit(self, call: InflightCall[Any], job: Job[Any]) -> None:
        super().submit(call, job)
        threading.Thread(target=self.work).start()


class NoModel:
    """Jobs without a model."""

    reader = SimpleNamespace(layouts=CallLayouts())

    def prepare(self, update: Update, selector: None, *, after: Any, proves_again: bool) -> Done:
        return Done()

    def fill(self, update: Update, source: Any, selector: None, digests: None) -> Staged:
        self.load()
        return Staged(staged_s=0.0, tensors=1, bytes=1)

    def load(self) -> None:
        """Do nothing. A test replaces this loader."""

    def seal(self, update: Update, base_digest: str | None) -> Voted:
        if base_digest is None:
            update.base_digest = "old"
        pair = torch.zeros(1), torch.ones(1)
        swap = PreparedSwap(swap_for(torch.device("cpu")), (pair,))
        update.sealed = Sealed("new", swap, (), names=self.names)
        return Voted(staged_s=0.0, staged_as=StagedChanges(form="device"))

    # whether a job has written weights in place
    is_written = False
    # names of the tensors that an update has received, by role
    names: Names = MappingProxyType({})

    def drop(self) -> None:
        """Release nothing."""

    def has_written(self) -> bool:
        return self.is_written

    def stop_proving(self) -> None:
        """Do nothing. A test replaces this."""


class OneRank:
    def __init__(self, worker: ManualWorker | None = None) -> None:
        scheduler: Any = type("OnCPU", (), {"device": "cpu"})()
        jobs: Any
        self.jobs = jobs = NoModel()
        none: Any = None
        self.worker = worker or ManualWorker()
        self.live = LiveWeights(scheduler)
        self.staging = Staging(
            jobs,
            self.worker,
            none,
            self.live,
            none,
            kv_tokens={},
            mode=StagingMode.DEVICE,
            can=Capabilities(),
            expect_no_step=lambda: None,
            prepare_to_hold=lambda: None,
            post_ahead=lambda source: None,
        )

    def do(self, step: Step, update_id: str = "u") -> None:
        """Take a step. Raise ``Conflict`` if it is refused."""
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
                self.live.swap_in(sealed.digest, sealed.swap, base=VersionLabel(0, "v0"))

    def stage_in_place(self, *, partial: bool) -> None:
        """Open an update that is written in place, and send it a tensor."""
        fields: dict[str, Any] = {"call_id": "", "update_id": "u", "timeout_s": 60.0}
        call = OpenCall(**fields, partial=partial, in_place=True)
        self.staging.open(call, current_version="v0")
        self.do(Step.STAGE)

    def reach(self, state: StagingState) -> None:
        for step in {EMPTY: [], OPEN: [Step.OPEN], SEALED: [Step.OPEN, Step.VOTED]}[state]:
            self.do(step)
        assert self.staging.state is state


def test_docstrings_table_matches_moves() -> None:
    assert staging.__doc__ is not None
    rows = re.findall(r"^    (\w+) +(\w+) +(\w+) +(\w+)$", staging.__doc__, re.MULTILINE)
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
def test_staging_follows_the_table(step: Step, state: StagingState) -> None:
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
def test_call_of_another_update_changes_no_state(step: Step, state: StagingState) -> None:
    rank = OneRank()
    rank.reach(state)
    if step is Step.DROP:
        rank.do(step, "another")
    else:
        with pytest.raises(Conflict):
            rank.do(step, "another")
    assert rank.staging.state is state


def test_dropped_update_is_not_sealed_later() -> None:
    """The seal's job runs after its update was dropped, perhaps while the next update is open."""
    rank = OneRank()
    rank.reach(OPEN)
    rank.do(Step.SEAL)
    rank.do(Step.DROP)
    rank.do(Step.OPEN, "next")
    rank.worker.work()
    assert rank.worker.failed == ["the update was dropped: by hand"] * 2
    assert rank.staging.state is OPEN


def test_rollback_is_possible_until_next_update() -> None:
    rank = OneRank()
    assert rank.staging.why_no_rollback() is not None
    rank.reach(SEALED)
    rank.do(Step.COMMIT)
    assert rank.staging.why_no_rollback() is None
    previous = rank.live.previous
    assert previous is not None
    assert (previous.version, previous.digest, rank.live.digest) == ("v0", "old", "new")
    # the next update is staged over the old version, and a drop does not restore it
    rank.do(Step.OPEN)
    assert rank.staging.why_no_rollback() == "an update is being staged over it"
    rank.do(Step.DROP)
    assert rank.staging.why_no_rollback() is not None


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_failure_before_the_first_write_in_place_stops_no_request(
    monkeypatch: pytest.MonkeyPatch, here: bool, elsewhere: bool
) -> None:
    monkeypatch.setattr(staging, "is_true_on_any_rank", lambda written: written or elsewhere)
    rank = OneRank(ImmediateWorker())
    rank.jobs.is_written = here
    rank.stage_in_place(partial=True)
    assert rank.live.dirty is not None
    rank.do(Step.DROP)
    assert (rank.live.dirty is not None) is (here or elsewhere)


def test_failure_before_the_first_write_leaves_torn_weights_torn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "is_true_on_any_rank", lambda written: written)
    rank = OneRank(ImmediateWorker())
    rank.live.write_in_place(["target"])
    rank.stage_in_place(partial=False)
    rank.do(Step.DROP)
    assert rank.live.dirty is not None


def test_weights_written_in_place_are_not_served_after_their_seal_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "is_true_on_any_rank", lambda written: written)
    rank = OneRank(ImmediateWorker())
    rank.stage_in_place(partial=True)
    rank.jobs.is_written = True
    rank.do(Step.SEAL)
    rank.do(Step.DROP)
    assert rank.live.dirty is not None


def test_loop_goes_on_if_an_update_in_place_failed_before_its_first_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The front end sends the seal before it hears of the failure."""
    monkeypatch.setattr(staging, "is_true_on_any_rank", lambda written: written)
    rank = OneRank(ImmediateWorker())
    rank.stage_in_place(partial=True)
    rank.do(Step.SEAL)
    rank.do(Step.DROP)
    assert rank.live.dirty is None


def test_rollback_to_partially_written_weights_is_not_offered() -> None:
    rank = OneRank()
    rank.live.write_in_place(["target"])
    call = OpenCall(call_id="", update_id="u", timeout_s=60.0, partial=False)
    rank.staging.open(call, current_version="v0")
    rank.do(Step.VOTED)
    rank.do(Step.COMMIT)
    assert (rank.live.dirty, rank.live.digest) == (None, "new")
    assert rank.live.reachable is None
    assert rank.staging.why_no_rollback() is not None


def test_update_opened_before_other_code_wrote_does_not_name_the_weights() -> None:
    """It knows the weights from before only, and has changed some of them."""
    rank = OneRank()
    rank.reach(SEALED)
    rank.live.lose_name()
    rank.live.move(Empty("other code has written them"))
    rank.do(Step.COMMIT)
    assert rank.live.hollow == "other code has written them"
    assert (rank.live.digest, rank.live.reachable) == (None, None)


def test_failed_exchange_leaves_no_weights_to_serve() -> None:
    rank = OneRank()
    rank.reach(SEALED)
    sealed = rank.staging.take("u")

    def fail() -> None:
        raise RuntimeError("by hand")

    object.__setattr__(sealed.swap, "_exchange", fail)
    with pytest.raises(RuntimeError, match="by hand"):
        rank.live.swap_in(sealed.digest, sealed.swap, base=VersionLabel(0, "v0"))
    assert rank.live.why_not_served is not None
    assert rank.live.exchanges % 2 == 0
    assert rank.live.reachable is None


def test_drop_keeps_no_digest() -> None:
    """Reading the weights for an update is no change visible to callers."""
    rank = OneRank()
    rank.reach(SEALED)
    rank.do(Step.DROP)
    assert rank.live.digest is None


@pytest.mark.parametrize(("may_be_empty", "tensors"), [(True, 0), (True, 1), (False, 0)])
def test_empty_session_may_have_written_by_rdma(may_be_empty: bool, tensors: int) -> None:
    """SGLang's clients send no tensor when they write over RDMA."""
    rank = OneRank()
    call = OpenCall(
        call_id="", update_id="u", timeout_s=60.0, partial=True, may_be_empty=may_be_empty
    )
    rank.staging.open(call, current_version="v0")
    assert rank.staging._update is not None
    rank.staging._update.tensors = tensors
    assert rank.staging.may_have_written_by_handles("u") is (may_be_empty and not tensors)
    assert not rank.staging.may_have_written_by_handles("another")
    rank.do(Step.DROP)
    assert not rank.staging.may_have_written_by_handles("u")


CUSTOM = TensorSource(serialized_named_tensors=[], load_format="my.loader")


def stage(rank: OneRank, timeout_s: float = 60.0, source: TensorSource = CUSTOM) -> None:
    rank.staging.stage(StageCall(call_id="", update_id="u", timeout_s=timeout_s, source=source))


def test_custom_loader_holds_the_loop() -> None:
    rank = OneRank(ImmediateWorker())
    rank.reach(OPEN)
    has_returned = threading.Event()
    found: list[bool] = []

    def load() -> None:
        # long enough for a loop that does not wait
        found.append(has_returned.wait(0.5))
        found.append(rank.staging.holds_the_loop)

    rank.jobs.load = load  # type: ignore[method-assign]
    stage(rank)
    has_returned.set()
    assert found == [False, True]
    assert not rank.staging.holds_the_loop


def test_sglangs_loader_does_not_hold_the_loop() -> None:
    rank = OneRank(ImmediateWorker())
    rank.reach(OPEN)
    has_returned, is_over = threading.Event(), threading.Event()

    def load() -> None:
        if has_returned.wait(10):
            is_over.set()

    rank.jobs.load = load  # type: ignore[method-assign]
    stage(rank, source=TensorSource(serialized_named_tensors=[]))
    has_returned.set()
    assert is_over.wait(10)


def test_hanging_custom_loader_releases_the_loop() -> None:
    rank = OneRank(ImmediateWorker())
    rank.reach(OPEN)
    over = threading.Event()
    rank.jobs.load = over.wait  # type: ignore[assignment, method-assign]
    stage(rank, timeout_s=0.1)
    assert not rank.staging.holds_the_loop
    over.set()


def test_failed_update_releases_the_loop() -> None:
    rank = OneRank(ImmediateWorker())
    rank.reach(OPEN)
    update = rank.staging._update
    assert update is not None
    update.failed = "by hand"
    ended = threading.Thread(target=stage, args=(rank,), daemon=True)
    ended.start()
    ended.join(10)
    assert not ended.is_alive()


def test_only_committed_sessions_compared_by_names_are_compared_with() -> None:
    rank = OneRank()

    def needs(names: set[str], *, as_before: bool = True, commits: bool = True) -> Names | None:
        """Make an update with ``names`` of the target, and return what it needed."""
        rank.jobs.names = {"target": frozenset(names)}
        call = OpenCall(
            call_id="", update_id="u", timeout_s=60.0, partial=True, as_before=as_before
        )
        rank.staging.open(call, current_version="v0")
        assert rank.staging._update is not None
        needed = rank.staging._update.needs
        for step in (Step.VOTED, Step.COMMIT) if commits else (Step.VOTED, Step.DROP):
            rank.do(step)
        return needed

    assert needs({"a"}) == {}
    assert needs({"a", "b"}) == {"target": frozenset({"a"})}
    assert needs({"a", "b", "c"}, commits=False) == {"target": frozenset({"a", "b"})}
    assert needs({"a"}, as_before=False) is None
    assert needs({"a", "b"}) == {"target": frozenset({"a", "b"})}


@pytest.mark.parametrize("in_place", [True, False])
def test_session_as_before_is_refused_where_it_would_be_written_in_place(in_place: bool) -> None:
    rank = OneRank()
    if not in_place:
        rank.staging.mode = StagingMode.OFF
    fields: dict[str, Any] = {"call_id": "", "update_id": "u", "timeout_s": 60.0}
    call = OpenCall(**fields, partial=True, as_before=True, in_place=in_place)
    with pytest.raises(Refused, match="SGLANG_INFLIGHT_SESSIONS"):
        rank.staging._open(call, "v0")
    assert rank.staging.state is EMPTY
    # no weights are served that could be left half written
    rank.live.move(Empty("for a test"))
    rank.staging._open(call, "v0")


def test_search_for_a_recipe_is_stopped_before_memory_is_released() -> None:
    """The search reads the served weights on a thread of its own."""
    rank = OneRank()
    done: list[str] = []
    rank.jobs.stop_proving = lambda: done.append("stopped")  # type: ignore[method-assign]

    def copy() -> Done:
        done.append("copied")
        return Done()

    rank.staging.when_idle(
        PrepareReleaseCall(call_id="", tags=["weights"], keep_weights="host"), copy
    )
    assert done == []
    rank.worker.work()
    assert done == ["stopped", "copied"]
