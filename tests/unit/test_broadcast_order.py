"""All ranks launch NCCL's broadcasts in one order, relative to their forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from sglang_inflight.messages import DistributedSource, OpenCall, StageCall, Staged
from sglang_inflight.scheduler.groups import groups
from sglang_inflight.scheduler.groups.groups import Group, Groups
from sglang_inflight.scheduler.groups.process_group import Formed
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.sources import broadcast
from sglang_inflight.scheduler.update.sources.call_layouts import CallLayouts
from sglang_inflight.scheduler.update.staging import Staging
from sglang_inflight.scheduler.update.update import Update
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.layouts import MOST_LISTED, layout_digest, layout_parts
from tests.unit.fakes import ManualWorker

CPU = torch.device("cpu")
NAME = "g"


class Device:
    """A device without real streams."""

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield


class Rank(ManualWorker):
    """A rank's launches. Its staging thread runs jobs when the test calls ``work``."""

    stream = "staging"

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []
        self.received: list[int] = []
        self.groups = Groups(60.0, CPU)
        self.layouts = CallLayouts()
        self.reader = SimpleNamespace(layouts=self.layouts)
        pg: Any = self
        self.group = self.groups._groups[NAME] = Group(NAME, Formed(pg, HashStore()))
        none: Any = None
        jobs: Any = self
        scheduler: Any = SimpleNamespace(device="cpu")
        self.staging = Staging(
            jobs,
            self,
            self.groups,
            LiveWeights(scheduler),
            none,
            kv_tokens={},
            mode=StagingMode.DEVICE,
            can=Capabilities(),
            expect_no_step=lambda: None,
            prepare_to_hold=lambda: None,
            post_ahead=lambda source: broadcast.post_ahead(
                source, self.groups, self.layouts, CPU, self.stream
            ),
        )
        # the first broadcast makes the communicator
        self.group.receive(torch.zeros(1), check=lambda: None)
        self.launched.clear()
        self.staging.open(
            OpenCall(call_id="", update_id="u", timeout_s=60, partial=True), current_version=""
        )
        self.work()

    # ---- jobs

    def prepare(self, update: Update, selector: None, *, after: Any, proves_again: bool) -> None:
        pass

    def fill(
        self, update: Update, source: DistributedSource, selector: None, digests: None
    ) -> Staged:
        for _, tensor in broadcast.receive(source, self.groups, self.layouts, CPU, update.check):
            self.received.append(int(tensor[0]))
        return Staged(staged_s=0.0, tensors=1, bytes=1)

    # ---- the loop

    def forward(self) -> None:
        self.launched.append("forward")

    def stage(self, tensors: int = 1, numel: int = 1) -> None:
        self.stage_source(
            DistributedSource(
                names=[f"w{n}" for n in range(tensors)],
                dtypes=["uint8"] * tensors,
                shapes=[[numel]] * tensors,
                group_name=NAME,
            )
        )

    def stage_source(self, source: DistributedSource) -> None:
        self.staging.stage(StageCall(call_id="", update_id="u", timeout_s=60, source=source))


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that has sent every requested tensor, filled with the broadcast's number."""

    def begin(tensor: torch.Tensor, src: int, group: Rank, async_op: bool) -> Any:
        group.launched.append("broadcast")
        number = group.launched.count("broadcast")
        return SimpleNamespace(
            is_completed=lambda: True,
            exception=lambda: None,
            wait=lambda: tensor.fill_(number),
        )

    monkeypatch.setattr(dist, "broadcast", begin)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(groups, "_abort_process_group", lambda group: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Device())


def test_late_staging_thread_keeps_launch_order() -> None:
    early, late = Rank(), Rank()
    for rank in (early, late):
        rank.forward()
        rank.stage(tensors=3)
    early.work()
    early.forward()
    late.forward()
    late.work()
    assert early.launched == late.launched
    assert early.launched == ["forward", *["broadcast"] * 3, "forward"]
    assert early.received == late.received == [1, 2, 3]


def test_consecutive_calls_keep_the_trainers_order() -> None:
    """The second call comes while the first call's last broadcasts are unposted."""
    rank = Rank()
    first = groups.WINDOW_COUNT + 5
    rank.stage(tensors=first)
    rank.stage(tensors=3)
    assert rank.launched == ["broadcast"] * groups.WINDOW_COUNT
    rank.work()
    assert rank.received == list(range(1, first + 4))
    # the next call is alone again
    rank.stage()
    assert rank.launched == ["broadcast"] * (first + 4)


def test_bucket_is_posted_ahead_if_its_layout_is_kept() -> None:
    """The loop reads neither many names nor a layout that is new."""
    tensors = MOST_LISTED + 1
    lists = [f"w{n}" for n in range(tensors)], ["uint8"] * tensors, [[1]] * tensors
    how: dict[str, Any] = {"group_name": NAME, "load_format": "flattened_bucket"}
    names, dtypes, shapes = lists
    digest = layout_digest(*lists)
    new: dict[str, Any] = {"layout_digest": digest, "layout_parts": [*layout_parts(*lists)]}
    rank = Rank()
    listed: dict[str, Any] = {"names": names, "dtypes": dtypes, "shapes": shapes}
    for fields in (listed, new):
        rank.launched.clear()
        rank.stage_source(DistributedSource(**how, **fields))
        assert rank.launched == []
        rank.work()
    rank.launched.clear()
    rank.stage_source(DistributedSource(**how, layout_digest=digest))
    assert rank.launched == ["broadcast"]
    rank.work()
    assert rank.failed == []
    # one by one, the loop would have to read all of them
    rank.stage_source(DistributedSource(group_name=NAME, layout_digest=digest))
    assert rank.launched == ["broadcast"]


def test_window_is_bounded_by_bytes() -> None:
    rank = Rank()
    rank.stage(tensors=10, numel=groups.WINDOW_BYTES // 2)
    assert rank.launched == ["broadcast"] * 2
    rank.work()
    assert rank.received == list(range(1, 11))


def test_dropped_call_breaks_its_group() -> None:
    rank = Rank()
    rank.stage(tensors=3)
    update = rank.staging._update
    assert update is not None
    update.dropped = "by hand"
    rank.work()
    assert (rank.received, rank.failed) == ([], ["the update was dropped: by hand"])
    with pytest.raises(Refused, match="is broken"):
        rank.group.receive(torch.zeros(1), check=lambda: None)


def run_out_of_memory(*args: Any, **kwargs: Any) -> Any:
    raise torch.cuda.OutOfMemoryError("out of memory")


def test_broadcast_failure_at_boundary_fails_only_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    monkeypatch.setattr(dist, "broadcast", run_out_of_memory)
    rank.stage()
    rank.work()
    assert rank.failed == [f"the trainer's broadcast in group {NAME!r} failed: out of memory"]


@pytest.mark.parametrize(
    "prevent",
    [
        pytest.param(lambda rank: setattr(rank, "stream", None), id="before the first job"),
        pytest.param(lambda rank: setattr(rank.group, "_has_met", False), id="before they met"),
    ],
)
def test_staging_thread_posts_broadcasts_missed_by_loop(
    prevent: Callable[[Rank], None],
) -> None:
    rank = Rank()
    prevent(rank)
    rank.stage(tensors=2)
    assert rank.launched == []
    rank.work()
    assert rank.received == [1, 2]


def test_gloo_broadcast_is_posted_when_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    rank = Rank()
    rank.stage(tensors=2)
    assert rank.launched == []
    rank.work()
    assert rank.received == [1, 2]
