"""A rank's workers answer each job, and survive its failure."""

from __future__ import annotations

import queue
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import BaseReq, msgpack_encode

from sglang_inflight.messages import Done, Failed, StatusCall
from sglang_inflight.scheduler import answers
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.checkpoint_files import read_safetensors
from sglang_inflight.scheduler.update.sources.tensors import _unpickle
from sglang_inflight.scheduler.update.worker import InlineWorker, Job, StagingWorker
from sglang_inflight.topology import Rank
from sglang_inflight.vocabulary.errors import Refused
from tests.support.device import Device

CPU = torch.device("cpu")


class Wire:
    """Encodes messages like between processes."""

    def __init__(self) -> None:
        self.came: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, message: BaseReq) -> None:
        msgpack_encode(message)
        self.came.put(message)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch, wire: Wire) -> AnswerChannel:
    monkeypatch.setattr(answers, "is_first_of_replica", lambda: True)
    monkeypatch.setattr(answers, "own_rank", lambda: Rank(0, 0, 0))
    return AnswerChannel(wire)


@pytest.fixture
def thread(channel: AnswerChannel) -> StagingWorker:
    return StagingWorker(channel, CPU, 0, UNPACED, list)


def call(call_id: str) -> Any:
    return StatusCall(call_id=call_id)


def expect_failure(thread: StagingWorker, wire: Wire, job: Job[Any], *words: str) -> None:
    """Expect an error as the answer to ``job``, and the next job to be done."""
    thread.submit(call("bad"), job)
    thread.submit(call("next"), Done)
    failed, done = wire.came.get(timeout=10), wire.came.get(timeout=10)
    assert isinstance(failed, Failed)
    assert (failed.call_id, [word for word in words if word not in failed.message]) == ("bad", [])
    assert (type(done), done.call_id) == (Done, "next")


HALF = b"\xed\xa0\x80"
# a pickled global of a module named by a lone surrogate
NAMES_NO_TEXT = b"\x80\x04\x8c" + bytes([len(HALF)]) + HALF + b"\x8c\x01x\x93."


def test_invalid_unicode_in_a_payload_is_answered(thread: StagingWorker, wire: Wire) -> None:
    expect_failure(thread, wire, lambda: _unpickle(NAMES_NO_TEXT), r"it names \ud800.x")


def test_invalid_unicode_in_a_file_name_is_answered(
    thread: StagingWorker, wire: Wire, tmp_path: Path
) -> None:
    path = bytes(tmp_path) + b"/model-\xff.safetensors"
    Path(path.decode(errors="surrogateescape")).write_bytes(b"abc")

    def read() -> Any:
        with AbandonableThread(lambda: None) as thread:
            paths = [str(file) for file in tmp_path.iterdir()]
            return list(read_safetensors(paths, thread, UNPACED))

    expect_failure(thread, wire, read, r"model-\udcff.safetensors")


def test_sys_exit_in_staging_thread_is_answered(thread: StagingWorker, wire: Wire) -> None:
    expect_failure(thread, wire, lambda: sys.exit("no such weights"), "no such weights")


def test_sys_exit_in_inline_loader_is_answered(channel: AnswerChannel, wire: Wire) -> None:
    prepared = []
    worker = InlineWorker(channel, CPU, prepare_to_hold=lambda: prepared.append(True))
    worker.submit(call("bad"), lambda: sys.exit("no such weights"))
    failed = wire.came.get_nowait()
    assert isinstance(failed, Failed)
    assert (failed.call_id, "no such weights" in failed.message) == ("bad", True)
    assert prepared == [True]


def test_unsendable_answer_is_logged(
    thread: StagingWorker, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    no_answer: Any = object()
    thread.submit(call("bad"), lambda: no_answer)
    thread.submit(call("next"), Done)
    assert wire.came.get(timeout=10).call_id == "next"
    assert "StatusCall could not be answered" in caplog.text


def test_failed_sglang_request_is_answered(channel: AnswerChannel, wire: Wire) -> None:
    request: Any = SimpleNamespace(rid="r", http_worker_ipc=None)
    channel.fail_request(request, KeyError("\ud800"), "it failed: \ud800")
    assert wire.came.get(timeout=10).message == r"it failed: \ud800"


class OnDevice:
    """A device for workers: tells which work it had done when an answer was sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, channel: AnswerChannel, wire: Wire) -> None:
        self.device = Device()
        self.done: frozenset[str] | None = None
        self.fails = False
        self.send = wire.send
        monkeypatch.setattr(torch, "get_device_module", lambda of: self.device)
        monkeypatch.setattr(channel, "_way", SimpleNamespace(send=self._send))

    def synchronize(self) -> None:
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.device.current_stream().synchronize()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def _send(self, message: BaseReq) -> None:
        self.done = self.device.current_stream().synchronized
        self.send(message)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch, channel: AnswerChannel, wire: Wire) -> OnDevice:
    return OnDevice(monkeypatch, channel, wire)


@pytest.mark.parametrize("is_refused", [False, True], ids=["done", "refused"])
@pytest.mark.parametrize("is_inline", [False, True], ids=["thread", "inline"])
def test_job_is_answered_after_its_copies(
    on_device: OnDevice,
    channel: AnswerChannel,
    thread: StagingWorker,
    wire: Wire,
    *,
    is_inline: bool,
    is_refused: bool,
) -> None:
    """The trainer frees the memory from which a copy reads when it has the answer."""

    def job() -> Done:
        on_device.device.launch("copy")
        if is_refused:
            raise Refused("'weight' is not finite")
        return Done()

    # the stream of a thread is there after its first job
    thread.stream = on_device
    inline = InlineWorker(channel, torch.device("cuda"), prepare_to_hold=lambda: None)
    (inline if is_inline else thread).submit(call("one"), job)
    answer = wire.came.get(timeout=10)
    assert (answer.call_id, type(answer)) == ("one", Failed if is_refused else Done)
    assert "copy" in (on_device.done or ())


def test_failed_wait_for_the_device_hides_no_error(
    on_device: OnDevice, thread: StagingWorker, wire: Wire
) -> None:
    on_device.fails = True
    thread.stream = on_device

    def job() -> Done:
        raise Refused("'weight' is not finite")

    thread.submit(call("bad"), job)
    thread.submit(call("next"), Done)
    first, then = wire.came.get(timeout=10), wire.came.get(timeout=10)
    assert "'weight' is not finite" in first.message
    assert "illegal memory access" in then.message
