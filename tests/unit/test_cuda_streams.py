"""Order of work on a device with streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.runtime_context import get_resources

from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.update import worker
from sglang_inflight.scheduler.update.live_machine import ReadDigest
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.swap import Pairs, PreparedSwap
from sglang_inflight.vocabulary.labels import VersionLabel
from tests.support.device import Device, Stream


class Loop:
    """The streams of a scheduler's loop. Its own stream is current."""

    device = "cuda"
    last_batch = None

    def __init__(self, *, overlaps: bool) -> None:
        self.device_module = Device()
        self.schedule_stream = self.device_module.Stream()
        self.forward_stream = self.device_module.Stream()
        self._overlaps = overlaps

    @property
    def stream_of_forwards(self) -> Stream:
        return self.forward_stream if self._overlaps else self.schedule_stream

    def forward(self, name: str) -> None:
        """Launch a forward like ``Scheduler.run_batch``."""
        if self._overlaps:
            self.forward_stream.wait_stream(self.schedule_stream)
        with self.device_module.stream(self.stream_of_forwards):
            self.device_module.launch(name)


class OnDevice:
    """A swap carried out by the device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._names = iter(("swap", "exchange", "exchange back"))

    def check(self, name: str, live: torch.Tensor) -> None:
        pass

    def prepare(self, pairs: Pairs) -> Callable[[], None]:
        return lambda: self._device.launch(next(self._names))


def swap_in(loop: Any) -> LiveWeights:
    weights = LiveWeights(loop)
    weights.move(ReadDigest("old"))
    pair = torch.ones(1), torch.zeros(1)
    swap = PreparedSwap(OnDevice(loop.device_module), (pair,))
    assert weights.swap_in("new", swap, base=VersionLabel(0, "v0")).nbytes == pair[0].nbytes
    return weights


@pytest.fixture(params=[True, False], ids=["overlap", "no overlap"])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    loop = Loop(overlaps=request.param)
    with loop.device_module.stream(loop.schedule_stream):
        yield loop


def test_swap_is_ordered_between_two_forwards(loop: Loop) -> None:
    loop.forward("old")
    weights = swap_in(loop)
    loop.forward("new")
    assert loop.device_module.is_ordered("old", "swap")
    assert loop.device_module.is_ordered("swap", "new")
    assert "swap" in weights.swapped.done
    # the host did not wait
    assert loop.forward_stream.synchronized is None
    assert loop.schedule_stream.synchronized is None


def test_staging_begins_behind_all_forwards_launched_so_far(loop: Loop) -> None:
    loop.forward("old")
    weights = swap_in(loop)
    loop.forward("new")
    assert weights.launched().done >= {"old", "swap", "new"}
    # the host did not wait
    assert loop.forward_stream.synchronized is None


def test_forward_of_the_previous_version_is_between_two_exchanges(loop: Loop) -> None:
    weights = swap_in(loop)
    loop.forward("before")
    assert weights.reachable is not None
    with weights.previous_in_place(weights.reachable):
        loop.forward("of the previous version")
    loop.forward("after")
    order = ("before", "exchange", "of the previous version", "exchange back", "after")
    assert all(loop.device_module.is_ordered(*pair) for pair in pairwise(order))
    # the staging thread waits for this event before it writes the shadow
    assert "exchange back" in weights.swapped.done
    assert loop.forward_stream.synchronized is None


def test_loops_own_device_work_follows_swap(loop: Loop) -> None:
    swap_in(loop)
    loop.device_module.launch("read of the loop")
    assert loop.device_module.is_ordered("swap", "read of the loop")


def test_drain_waits_for_last_forward(loop: Loop) -> None:
    scheduler: Any = loop
    metrics: Any = None
    loop.forward("last")
    Boundary(scheduler, metrics).drain()
    assert "last" in (loop.stream_of_forwards.synchronized or ())


def test_staging_stream_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(pool=4)
    loop = SimpleNamespace(
        schedule_stream=device.Stream(), forward_stream=device.Stream(), copy_stream=None
    )
    monkeypatch.setitem(get_resources().streams, "alt", device.Stream())
    # the pool wraps around at the next stream but one
    device.Stream()
    monkeypatch.setattr(torch, "get_device_module", lambda of: device)
    scheduler: Any = loop
    in_use = worker.streams_of(scheduler, [])
    assert len(in_use) == 3
    own = worker.own_stream(torch.device("cuda"), in_use)
    assert own.cuda_stream not in {stream.cuda_stream for stream in in_use}


def test_stream_without_a_handle_is_used_as_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(Stream=lambda: "a new one")
    monkeypatch.setattr(torch, "get_device_module", lambda of: device)
    assert worker.own_stream(torch.device("xpu"), [object()]) == "a new one"
