"""Changes that a device still exchanges are not freed, whatever drops their swap."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from sglang_inflight.messages import OpenCall
from sglang_inflight.scheduler.update.changes.encoding import Changes, bits_of, find_changes
from sglang_inflight.scheduler.update.changes.exchange import Exchange
from sglang_inflight.scheduler.update.commit import CommitAnswers
from sglang_inflight.scheduler.update.live_machine import Open, ReadDigest
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.staging import Staging
from sglang_inflight.scheduler.update.swap import PreparedSwap, swap_for
from sglang_inflight.scheduler.update.update import Update
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.labels import VersionLabel
from tests.support.device import Device
from tests.support.rank import Rank
from tests.unit.fakes import ManualWorker

CPU = torch.device("cpu")


class OnDevice:
    """A rank whose swaps a device makes later. Its weight has one change, held by the swap."""

    def __init__(self) -> None:
        module = Device()
        scheduler: Any = SimpleNamespace(
            device="cuda", device_module=module, forward_stream=module.Stream()
        )
        self.live = LiveWeights(scheduler)
        self.live.move(ReadDigest("old"))
        self.worker = ManualWorker()
        self.live.attach({}, free=lambda swap: self.worker.do(swap.free))
        none: Any = None
        jobs: Any = SimpleNamespace(
            forget_shadows=lambda: None,
            prepare=lambda update, selector, after, proves_again: None,
        )
        self.staging = Staging(
            jobs,
            self.worker,
            none,
            self.live,
            none,
            mode=StagingMode.CHANGES,
            kv_tokens={},
            can=Capabilities(),
            expect_no_step=lambda: None,
            prepare_to_hold=lambda: None,
            post_ahead=none,
        )
        self.answers = CommitAnswers(none, self.live, none)
        self._values: Any = None

    def commit(self) -> None:
        weight = torch.zeros(64)
        new = weight.clone()
        new[3] = 1
        part = find_changes(0, bits_of(weight), bits_of(new))
        assert part is not None
        self._values = weakref.ref(part.values)
        swap = PreparedSwap(swap_for(CPU), changes=Exchange([(weight, [part])]))
        self.live.swap_in("new", swap, base=VersionLabel(0, "v0"))

    def take_a_turn(self) -> None:
        assert self.live.reachable is not None
        with self.live.previous_in_place(self.live.reachable):
            pass

    @property
    def holds_changes(self) -> bool:
        return self._values() is not None

    def reach_the_last_swap(self) -> None:
        swap = self.live.last_swap
        assert swap is not None
        swap.ended.at = 1.0


def open_update(rank: OnDevice) -> None:
    rank.commit()
    rank.take_a_turn()
    call = OpenCall(call_id="", update_id="u", timeout_s=60, partial=True)
    rank.staging.open(call, current_version="v1")


def lose_name(rank: OnDevice) -> None:
    rank.commit()
    rank.live.lose_name()


def commit_over_unknown_weights(rank: OnDevice) -> None:
    rank.live.lose_name()
    rank.commit()


def commit_again(rank: OnDevice) -> None:
    rank.commit()
    values = rank._values
    rank.commit()
    rank._values = values


@pytest.mark.parametrize(
    "give_up", [open_update, lose_name, commit_over_unknown_weights, commit_again]
)
def test_changes_are_held_until_the_device_has_exchanged_them(
    give_up: Callable[[OnDevice], None],
) -> None:
    rank = OnDevice()
    give_up(rank)
    rank.answers.give_due()
    rank.worker.work()
    assert rank.holds_changes
    swapped = rank.live.swapped
    assert not swapped.was_waited_for
    rank.reach_the_last_swap()
    rank.answers.give_due()
    # thousands of tensors are freed on the staging thread
    assert rank.holds_changes
    rank.worker.work()
    assert not rank.holds_changes


def test_commit_exchanges_pointers_after_an_opening_on_a_cpu() -> None:
    """A swap holds the memory it exchanges, and memory with other users is copied."""
    live = LiveWeights(SimpleNamespace(device="cpu"))  # type: ignore[arg-type]
    live.move(ReadDigest("old"))
    worker = ManualWorker()
    live.attach({}, free=lambda swap: worker.do(swap.free))
    pair = torch.zeros(4), torch.ones(4)
    for _ in range(3):
        # the staging thread frees it before it stages
        live.move(Open(partial=True))
        worker.work()
        before = [tensor.data_ptr() for tensor in pair]
        live.swap_in("new", PreparedSwap(swap_for(CPU), (pair,)), base=VersionLabel(0, "v0"))
        assert [tensor.data_ptr() for tensor in pair] == before[::-1]


def test_release_of_memory_waits_for_the_exchange_and_frees_the_changes() -> None:
    rank = OnDevice()
    rank.commit()
    rank.staging.forget_shadows()
    assert rank.live.swapped.was_waited_for
    assert not rank.holds_changes


class Loads(nn.Linear):
    """A model of one layer."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            default_weight_loader(self.weight, tensor)


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def changes_of(rank: Rank) -> Changes:
    form: Any = rank._jobs._shadows.form._form
    found: Changes = form._recording.changes()
    return found


@pytest.mark.usefixtures("no_grad")
def test_update_in_place_frees_no_changes_before_the_last_swap() -> None:
    """The shadow of another form is forgotten, and with it what the last commit exchanged."""
    rank = Rank(StagingMode.CHANGES, Loads(), checkpoint_shapes={"weight": (4, 4)})
    rank.update({"weight": torch.ones(4, 4)})
    [(_, parts)] = changes_of(rank)
    values = weakref.ref(parts[0].values)
    del parts
    rank._previous = None
    held = []
    after = SimpleNamespace(synchronize=lambda: held.append(values() is not None))
    opened: Any = SimpleNamespace(
        update_id="u", partial=False, may_be_empty=False, in_place=True, asks_digests=False
    )
    rank._jobs.prepare(Update(opened, base_version=""), None, after=after)
    assert held == [True]
    assert values() is None
