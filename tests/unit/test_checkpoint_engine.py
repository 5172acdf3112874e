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
from sglang_inflight.scheduler.update.sources import checkpoint_engine
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.checkpoint_engine import receive_ipc
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
