"""A trainer's exit ends the transfer at once, and loses no sent message."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from torch.multiprocessing.reductions import reduce_tensor

from sglang_inflight.messages import IPCSource
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.sources import checkpoint_engine, stretch
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.checkpoint_engine import (
    Listings,
    _extract,
    receive_ipc,
)
from sglang_inflight.scheduler.update.sources.stretch import take_none
from sglang_inflight.vocabulary.errors import Dropped, Refused
from tests.support.checkpoint_engine import DEVICE, leaves_once_met
from tests.support.device import Device
from tests.unit.fakes import name_device_as_trainers_do

CPU = torch.device("cpu")
LEFT = "closed its socket"


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    name_device_as_trainers_do(monkeypatch)


def within_a_minute() -> Callable[[], None]:
    end = time.monotonic() + 60.0

    def check() -> None:
        if time.monotonic() > end:
            raise Dropped("the update's time ran out")

    return check


def batches_of(handles: dict[str, str]) -> Any:
    return receive_ipc(IPCSource(zmq_handles=handles), CPU, within_a_minute(), UNPACED)


class Impatient:
    """A trainer that sends without waiting for an answer."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        address = f"ipc://{folder / 'trainer'}"
        self._socket.bind(address)
        self.handles = {DEVICE: address}
        self._buffer = torch.zeros(16, dtype=torch.uint8).share_memory_()

    def send_handle(self) -> None:
        self._send(reduce_tensor(self._buffer))

    def send_listing(self, name: str) -> None:
        shape = torch.Size([4])
        self._send([{"name": name, "shape": shape, "dtype": torch.float32, "offset": 0}])

    def leave(self) -> None:
        """Return when all messages are out and the socket is closed."""
        self._socket.close()
        self._context.term()

    def _send(self, message: Any) -> None:
        self._socket.send_multipart([b"", bytes(ForkingPickler.dumps(message))])


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Impatient]:
    trainer = Impatient(tmp_path)
    yield trainer
    trainer._context.destroy()


def names_of(batch: Any) -> list[str]:
    return [name for name, _ in batch]


def test_exit_of_trainer_before_its_first_message_is_refused() -> None:
    with leaves_once_met() as handles, pytest.raises(Refused, match=LEFT):
        next(batches_of(handles))


def test_last_message_before_trainers_exit_is_read(trainer: Impatient) -> None:
    batches = batches_of(trainer.handles)
    with ThreadPoolExecutor(1) as rank:
        first = rank.submit(next, batches)
        trainer.send_handle()
        trainer.send_listing("a")
        assert names_of(first.result()) == ["a"]
    trainer.send_listing("b")
    trainer.leave()
    assert names_of(next(batches)) == ["b"]
    with pytest.raises(Refused, match=LEFT):
        next(batches)


def test_refused_trainer_is_answered_after_the_copies_from_its_buffer(
    trainer: Impatient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer takes a failure for an answer, and fills its buffer again."""
    device = Device()
    done: list[frozenset[str] | None] = []
    monkeypatch.setattr(torch, "get_device_module", lambda of: device)
    monkeypatch.setattr(
        zmq.Socket,
        "send_string",
        lambda *_: done.append(device.current_stream().synchronized),
    )
    monkeypatch.setattr(
        checkpoint_engine, "AbandonableThread", lambda check, of: AbandonableThread(check)
    )
    monkeypatch.setattr(checkpoint_engine, "_rebuild", lambda handle, of: trainer._buffer)
    source = IPCSource(zmq_handles=trainer.handles)
    batches: Any = receive_ipc(source, torch.device("cuda"), within_a_minute(), UNPACED)
    with ThreadPoolExecutor(1) as rank:
        first = rank.submit(next, batches)
        trainer.send_handle()
        trainer.send_listing("a")
        assert names_of(first.result()) == ["a"]
    device.launch("copy")
    batches.close()
    assert "copy" in (done[0] or ())


# ---- lists of tensors -------------------------------------------------------------------


def item(name: str, shape: list[int], dtype: Any, offset: Any) -> dict[str, Any]:
    return {"name": name, "shape": torch.Size(shape), "dtype": dtype, "offset": offset}


def listed(items: list[Any], listings: Listings, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    found = listings.read(bytes(ForkingPickler.dumps(items)), lambda: None)
    assert found is not None
    return dict(_extract(found, buffer, take_none))


@pytest.mark.parametrize("most", [stretch.MOST_BYTES, 12])
def test_tensors_are_found_beside_gaps_and_in_any_order(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretch, "MOST_BYTES", most)
    buffer = torch.arange(64, dtype=torch.uint8)
    items = [
        item("a", [2], torch.float32, 4),
        item("b", [3], torch.uint8, 16),
        item("c", [2, 1], torch.int16, 20),
        item("empty", [0, 3], torch.int64, 24),
        item("d", [1], torch.int64, 48),
        item("e", [], torch.int32, 0),
    ]
    found = listed(items, Listings(), buffer)
    assert [*found] == ["a", "b", "c", "empty", "d", "e"]
    for each in items:
        start, tensor = each["offset"], found[each["name"]]
        expected = buffer[start : start + tensor.nbytes].view(each["dtype"]).view(each["shape"])
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize(
    "wrong",
    [
        item("a", [1], torch.float32, 2),
        item("a", [1], torch.float32, -4),
        item("a", [17], torch.float32, 0),
        item("a", [-1], torch.float32, 0),
        item("a", [1], torch.float32, 0.0),
        item("a", [1], torch.zeros(1), 0),
        {"name": "a"},
        7,
    ],
    ids=["unaligned", "negative", "too long", "size", "float", "dtype", "lacks", "number"],
)
def test_wrong_item_of_a_list_is_refused(wrong: Any) -> None:
    with pytest.raises(Refused, match="listing is malformed"):
        listed([wrong], Listings(), torch.zeros(64, dtype=torch.uint8))


def test_list_of_the_last_update_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    listings, items = Listings(), [item("a", [4], torch.uint8, 8)]
    listings.begin()
    listed(items, listings, torch.zeros(16, dtype=torch.uint8))
    listings.end()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_engine, "_unpickle", None)
        listings.begin()
        buffer = torch.arange(16, dtype=torch.uint8)
        assert listed(items, listings, buffer)["a"].tolist() == [8, 9, 10, 11]
    # an update with other lists forgets it
    listings.begin()
    listings.end()
    monkeypatch.setattr(checkpoint_engine, "_unpickle", lambda *_: None)
    assert listings.read(bytes(ForkingPickler.dumps(items)), lambda: None) is None
