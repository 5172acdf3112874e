"""Writes to live weights outside an update are noticed, or refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    ResumeMemoryOccupationReqInput,
    RpcReqInput,
    UpdateWeightFromDiskReqInput,
)
from sglang.srt.managers.scheduler import Scheduler
from torch import nn

from sglang_inflight.scheduler import other_writers
from sglang_inflight.scheduler.other_writers import OtherWriters
from sglang_inflight.scheduler.update.live_machine import Open, ReadDigest
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.swap import PreparedSwap, swap_for
from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.labels import VersionLabel

NOBODY: Any = None


class HollowWeights:
    """Records the reports of such writes."""

    def __init__(self) -> None:
        self.noticed: list[Any] = []

    def overwritten(self, why: str) -> None:
        self.noticed.append(why)

    def resumed_by_sglang(self, tags: list[str] | None) -> None:
        self.noticed.append(tags)


@pytest.fixture
def hollow() -> HollowWeights:
    return HollowWeights()


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(4, 4)


@pytest.fixture
def handle(
    hollow: HollowWeights, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Any], None]:
    """SGLang's handling of a request, on a scheduler with a plugin's methods."""
    monkeypatch.setattr(other_writers, "is_true_on_any_rank", bool)

    class Extended(Scheduler):
        def __init__(self) -> None:
            runners = [("target", SimpleNamespace(model=model))]
            updater: Any = SimpleNamespace(_select_runners=lambda which: runners)
            self.weight_updater = updater

        def scale(self, by: float) -> None:
            # loaders write through ``.data``, and a tensor's version does not count such writes
            model.get_parameter("weight").data.mul_(by)

        def configure_logging(self, *args: Any) -> None:
            """One of SGLang's own methods, made to write. Its writes are not checked."""
            self.scale(2.0)

    Extended.configure_logging.__module__ = Scheduler.__module__
    scheduler: Any = Extended()
    anyone: Any = hollow
    writers = OtherWriters(scheduler, NOBODY, anyone)

    def handle(request: Any) -> None:
        with writers.around(request):
            if isinstance(request, RpcReqInput):
                getattr(scheduler, request.method)(**(request.parameters or {}))

    return handle


def test_weights_written_by_an_rpc_are_noticed(
    handle: Callable[[Any], None], hollow: HollowWeights
) -> None:
    handle(RpcReqInput(method="scale", parameters={"by": 1.0}))
    assert hollow.noticed == []
    handle(RpcReqInput(method="scale", parameters={"by": 3.0}))
    assert hollow.noticed == ["the RPC 'scale' has written them"]


def test_rpc_without_a_write_is_not_reported(
    handle: Callable[[Any], None], hollow: HollowWeights, model: nn.Module
) -> None:
    with pytest.raises(TypeError):
        handle(RpcReqInput(method="scale", parameters={"times": 3.0}))
    assert hollow.noticed == []
    model.get_parameter("weight").data.fill_(float("nan"))
    handle(RpcReqInput(method="scale", parameters={"by": 1.0}))
    assert hollow.noticed == []


def test_sglangs_own_rpcs_are_not_checked(
    handle: Callable[[Any], None], hollow: HollowWeights
) -> None:
    handle(RpcReqInput(method="configure_logging"))
    assert hollow.noticed == []


@pytest.mark.parametrize(
    "request_of_sglang",
    [
        UpdateWeightFromDiskReqInput(model_path="/somewhere"),
        BeginWeightUpdateReqInput(),
        EndWeightUpdateReqInput(),
    ],
    ids=lambda request: type(request).__name__,
)
def test_sglangs_update_requests_are_refused(
    handle: Callable[[Any], None], hollow: HollowWeights, request_of_sglang: Any
) -> None:
    with pytest.raises(Refused, match=f"{type(request_of_sglang).__name__} .*HTTP routes"):
        handle(request_of_sglang)
    assert hollow.noticed == []


def test_memory_resumed_by_sglang_is_noticed(
    handle: Callable[[Any], None], hollow: HollowWeights
) -> None:
    handle(ResumeMemoryOccupationReqInput(tags=["weights"]))
    assert hollow.noticed == [["weights"]]


def test_rollback_to_unnamed_weights_is_not_offered() -> None:
    scheduler: Any = SimpleNamespace(device="cpu")
    live = LiveWeights(scheduler)
    served, shadow = torch.zeros(4), torch.ones(4)
    swap = PreparedSwap(swap_for(torch.device("cpu")), ((served, shadow),))
    live.move(ReadDigest("zeros"))
    live.swap_in("ones", swap, base=VersionLabel(0, "v0"))
    assert known_digests(live) == ("zeros", True, "ones")
    served.fill_(7.0)
    live.lose_name()
    assert known_digests(live) == (None, False, None)
    live.move(Open(partial=False))
    # an update reads the live weights at its seal
    live.move(ReadDigest("sevens"))
    live.swap_in("zeros", swap, base=VersionLabel(0, "v1"))
    assert known_digests(live) == (None, False, "zeros")
    live.swap_in("sevens", swap, base=VersionLabel(0, "v2"))
    assert known_digests(live) == ("zeros", True, "sevens")


def known_digests(live: LiveWeights) -> tuple[str | None, bool, str | None]:
    """Return the previous version's digest, its reachability by rollback, and the live digest."""
    before = None if live.previous is None else live.previous.digest
    return before, live.reachable is not None, live.digest
