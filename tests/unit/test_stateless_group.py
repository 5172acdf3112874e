"""vLLM's rendezvous: the place of the trainer's id, and the errors of an early end."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sglang.srt.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import Backend

from harness.server import free_port
from sglang_inflight.messages import JoinGroupCall
from sglang_inflight.scheduler.groups.groups import Group
from sglang_inflight.scheduler.groups.process_group import Formed, construct
from sglang_inflight.scheduler.groups.rendezvous import Rendezvous
from sglang_inflight.scheduler.groups.stateless_group import (
    UNIQUE_ID,
    _store_with,
    form_stateless_group,
)
from sglang_inflight.vocabulary.errors import Refused
from tests.support.load import until

ID = bytes(range(128))
HERE = "127.0.0.1"
TIMEOUT = timedelta(seconds=20)
CPU = torch.device("cpu")


class Looked(Exception):
    """Torch has made the backend's store, and NCCL would be next."""


def test_unique_id_is_stored_under_torchs_key() -> None:
    """A backend for CUDA gets NCCL's store, and needs no device."""
    found: list[bytes] = []

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        # NCCL's key for the first communicator
        found.append(store.get("0"))
        raise Looked

    Backend.register_backend("looks", make, devices=["cuda"])
    with pytest.raises(Looked):
        construct(
            "looks", _store_with(ID, "g", TIMEOUT), name="g", rank=1, world_size=2, timeout=TIMEOUT
        )
    assert found == [ID]


def test_more_ranks_than_one_id_allows_are_refused() -> None:
    port = free_port()
    master = TCPStore(HERE, port, is_master=True, wait_for_workers=False)
    master.set(UNIQUE_ID, pickle.dumps(ncclUniqueId()))  # type: ignore[arg-type]
    with pytest.raises(Refused, match="TORCH_NCCL_RANKS_PER_ROOT=129"):
        form_stateless_group(
            "nccl",
            HERE,
            port,
            name="g",
            rank=1,
            world_size=129,
            timeout=TIMEOUT,
            device=CPU,
            on_id=lambda: None,
        )
    del master


class Meeting:
    """A rendezvous of the second of two ranks, and its outcome."""

    def __init__(self, port: int, timeout_s: float) -> None:
        self._ended: queue.SimpleQueue[Formed | Exception] = queue.SimpleQueue()
        self.discarded: queue.SimpleQueue[Formed] = queue.SimpleQueue()
        call = JoinGroupCall(
            master_address=HERE,
            master_port=port,
            rank_offset=1,
            world_size=2,
            group_name="g",
            backend="gloo",
            rendezvous="stateless",
        )
        self._rendezvous = Rendezvous(
            call,
            1,
            timeout_s,
            CPU,
            retire_useless=lambda: None,
            on_end=self._ended.put,
            discard=self.discarded.put,
        )
        self._rendezvous.start()

    def give_up(self) -> None:
        self._rendezvous.give_up("its caller left")

    @property
    def missing(self) -> str:
        return self._rendezvous.describe()

    def outcome(self) -> Formed | Exception:
        return self._ended.get(timeout=60)

    def refusal(self) -> str:
        outcome = self.outcome()
        assert isinstance(outcome, Refused)
        return str(outcome)


@pytest.fixture
def port() -> int:
    return free_port()


def trainer_store(port: int, *, waits: bool = True) -> TCPStore:
    return TCPStore(
        HERE, port, 2, is_master=True, timeout=TIMEOUT, wait_for_workers=waits, use_libuv=False
    )


InThread = Callable[[Callable[[], Any]], "queue.SimpleQueue[Any]"]


@pytest.fixture
def in_thread() -> Iterator[InThread]:
    threads: list[threading.Thread] = []

    def start(work: Callable[[], Any]) -> queue.SimpleQueue[Any]:
        result: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threads.append(threading.Thread(target=lambda: result.put(work())))
        threads[-1].start()
        return result

    yield start
    for thread in threads:
        thread.join()


def form_as_trainer(store: Store, port: int) -> Any:
    """Form the group outside torch's table. This process has the rank's group of the same name
    there.
    """
    for prefix in (f"tcp://{HERE}:{port}", "g/", "cpu/"):
        store = PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, 0, 2, TIMEOUT)


def test_stateless_rendezvous_forms_group(port: int, in_thread: InThread) -> None:
    def train() -> Any:
        store = trainer_store(port)
        store.set(UNIQUE_ID, pickle.dumps(ncclUniqueId()))  # type: ignore[arg-type]
        group = form_as_trainer(store, port)
        group.broadcast([torch.tensor([7.0])], dist.BroadcastOptions()).wait()
        return group

    trainer = in_thread(train)
    outcome = Meeting(port, timeout_s=60).outcome()
    assert isinstance(outcome, Formed), outcome
    tensor = torch.zeros(1)
    group = Group("g", outcome)
    group.receive(tensor, check=lambda: None)
    assert tensor.tolist() == [7]
    trainer.get()
    group.leave()


def test_rendezvous_without_a_trainer_times_out(port: int) -> None:
    assert "nobody came within 0.3 s" in Meeting(port, timeout_s=0.3).refusal()


@pytest.mark.parametrize("timer", ["on time", "late"])
def test_missing_unique_id_is_named(port: int, timer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that waits for other ranks, or meets in another way, leaves no id.

    A late timer lets torch's own time limit end the wait.
    """
    if timer == "late":
        monkeypatch.setattr(threading.Timer, "start", lambda timer: None)
    store = trainer_store(port, waits=False)
    said = Meeting(port, timeout_s=1).refusal()
    for word in (f"'g' at tcp://{HERE}:{port}", "no NCCL id", "rendezvous 'torch'", "within 1 s"):
        assert word in said
    del store


def test_invalid_unique_id_is_refused(port: int) -> None:
    store = trainer_store(port, waits=False)
    store.set(UNIQUE_ID, pickle.dumps("an id"))  # type: ignore[arg-type]
    assert "no pickled ncclUniqueId" in Meeting(port, timeout_s=60).refusal()


def test_group_formed_after_a_cancel_is_discarded(port: int, in_thread: InThread) -> None:
    store = trainer_store(port, waits=False)
    meeting = Meeting(port, timeout_s=60)
    # from here on the rendezvous does not check for a cancel
    until("it waits for the id", lambda: "no NCCL id" in meeting.missing)
    meeting.give_up()
    assert "its caller left" in meeting.refusal()
    store.set(UNIQUE_ID, pickle.dumps(ncclUniqueId()))  # type: ignore[arg-type]
    trainer = in_thread(lambda: form_as_trainer(store, port))
    formed = meeting.discarded.get(timeout=60)
    dist.destroy_process_group(formed.group)
    trainer.get()
