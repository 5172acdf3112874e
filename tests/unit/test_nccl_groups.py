"""Groups over NCCL, on a fake without a GPU: a stalled trainer costs its update, not the server."""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sglang.srt.utils import init_custom_process_group
from sglang.srt.utils.network import get_free_port
from torch._C._distributed_c10d import HashStore

from sglang_inflight.client.trainer_group import TrainerGroup
from sglang_inflight.nccl_errors import NEVER, errors_cost_the_group_only, name_error_handling
from sglang_inflight.scheduler.groups import groups, process_group
from sglang_inflight.scheduler.groups.groups import Group
from sglang_inflight.scheduler.groups.process_group import (
    Formed,
    construct,
    form_group,
)
from sglang_inflight.vocabulary.errors import Dropped, Refused

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
RENDEZVOUS = datetime.timedelta(seconds=5)


class Arguments(dict[str, Any]):
    """The arguments of a group's constructor."""


def form(monkeypatch: pytest.MonkeyPatch, backend: str) -> Arguments:
    """Form a group up to torch's constructor, which finds no GPU here. The rendezvous is real."""
    made = Arguments()

    def construct(**arguments: Any) -> str:
        made.update(arguments, handling=os.environ.get(HANDLING))
        return "a group"

    def set_timeout(timeout: datetime.timedelta, group: Any) -> None:
        made["set to"] = timeout

    monkeypatch.setattr(process_group, "init_custom_process_group", construct)
    monkeypatch.setattr(dist, "set_timeout", set_timeout)
    address = f"tcp://127.0.0.1:{get_free_port()}"
    form_group(backend, address, name="g", rank=0, world_size=1, timeout=RENDEZVOUS)
    return made


# "glass" stands for the backends of other devices
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "glass"])
def test_nccl_watchdog_ends_no_broadcast_or_process(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    made = form(monkeypatch, backend)
    assert made["set to"] == NEVER
    assert made["handling"] == "2"
    # few CTAs leave the device to the forwards running beside
    options = made["pg_options"]
    if backend == "nccl":
        assert options.config.max_ctas == process_group.MAX_CTAS <= 2
        assert options._timeout == RENDEZVOUS
    else:
        # torch would hand the options to the other backends, too
        assert options is None
    # the rendezvous itself times out
    assert made["timeout"] == made["store"].timeout == RENDEZVOUS


def test_nccl_watchdog_ends_no_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Arguments()

    class Constructed:
        Options = dist.ProcessGroupNCCL.Options

        def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
            made.update(rank=rank, size=size, timeout=options._timeout)
            made["handling"] = os.environ.get(HANDLING)

        def abort(self) -> None:
            made["aborted"] = True

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Constructed)
    before = os.environ.get(HANDLING)
    group = TrainerGroup("g", 2, backend="nccl", timeout_s=5)
    group.form().result()
    group.leave()
    assert made == {"rank": 0, "size": 3, "timeout": NEVER, "handling": "2", "aborted": True}
    assert os.environ.get(HANDLING) == as_torch_reads(before)


def as_torch_reads(handling: str | None) -> str:
    return "3" if handling is None else handling


def test_gloo_keeps_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = form(monkeypatch, "gloo")
    assert made["timeout"] == RENDEZVOUS
    assert "set to" not in made


@pytest.mark.parametrize("backend", ["gloo", "mpi", "cpu:gloo,cuda:gloo"])
def test_backend_on_the_host_launches_nothing(backend: str) -> None:
    assert not process_group.launches(backend)


@pytest.mark.parametrize("before", [None, "1"])
def test_other_groups_keep_their_watchdogs(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv(HANDLING, raising=False)
    if before is not None:
        monkeypatch.setenv(HANDLING, before)
    form(monkeypatch, "nccl")
    assert os.environ.get(HANDLING) == as_torch_reads(before)


@pytest.mark.parametrize(("older", "meant"), [(None, "3"), ("1", "1")])
def test_forming_a_group_moves_no_environment_variable(
    monkeypatch: pytest.MonkeyPatch, older: str | None, meant: str
) -> None:
    """C++ code of another thread may read the environment meanwhile."""
    monkeypatch.delenv(HANDLING, raising=False)
    monkeypatch.delenv("NCCL_ASYNC_ERROR_HANDLING", raising=False)
    if older is not None:
        monkeypatch.setenv("NCCL_ASYNC_ERROR_HANDLING", older)
    name_error_handling()
    assert os.environ[HANDLING] == meant
    places = [*os.environ]
    removed: list[str] = []
    monkeypatch.setattr(os, "unsetenv", removed.append)
    with errors_cost_the_group_only():
        assert [*os.environ] == places
    assert [*os.environ] == places
    assert removed == []
    assert os.environ[HANDLING] == meant


def test_group_of_one_forms_with_real_constructor() -> None:
    address = f"tcp://127.0.0.1:{get_free_port()}"
    formed = form_group("gloo", address, name="one", rank=0, world_size=1, timeout=RENDEZVOUS)
    try:
        tensor = torch.ones(3)
        dist.broadcast(tensor, src=0, group=formed.group)
        assert tensor.tolist() == [1, 1, 1]
        assert Group("one", formed).rank == 0
    finally:
        dist.destroy_process_group(formed.group)


def test_waiting_rendezvous_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, goes_on = threading.Event(), threading.Event()

    def init(**arguments: Any) -> Any:
        if arguments["group_name"] == "waits":
            # gloo blocks here for missing peers
            waits.set()
            goes_on.wait()
        return init_custom_process_group(**arguments)

    def form(name: str) -> None:
        group = construct("gloo", HashStore(), name=name, rank=0, world_size=1, timeout=RENDEZVOUS)
        dist.destroy_process_group(group)

    monkeypatch.setattr(process_group, "init_custom_process_group", init)
    first, second = (threading.Thread(target=form, args=(name,)) for name in ("waits", "comes"))
    before = os.environ.get(HANDLING)
    first.start()
    assert waits.wait(timeout=30)
    second.start()
    second.join(timeout=30)
    seen = second.is_alive(), os.environ.get(HANDLING)
    goes_on.set()
    first.join()
    assert seen == (False, before)


class Broadcast:
    """A broadcast that is stuck or failed. Like NCCL's, its ``wait`` raises nothing."""

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure

    def is_completed(self) -> bool:
        return self._failure is not None

    def exception(self) -> Exception | None:
        return self._failure

    def wait(self) -> bool:
        return True


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Groups with an aborted communicator."""
    ended: list[Any] = []
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(groups, "_abort_process_group", ended.append)
    return ended


def broadcast(monkeypatch: pytest.MonkeyPatch, work: Broadcast) -> None:
    monkeypatch.setattr(dist, "broadcast", lambda *args, **kwargs: work)


def out_of_time() -> Callable[[], None]:
    asked = iter(range(3))

    def check() -> None:
        if next(asked) == 2:
            raise Dropped("the update's time ran out")

    return check


def test_dropped_broadcast_aborts_its_group(
    monkeypatch: pytest.MonkeyPatch, aborted: list[Any]
) -> None:
    pg: Any = object()
    group = Group("g", Formed(pg, HashStore()))
    broadcast(monkeypatch, Broadcast())
    with pytest.raises(Dropped, match="time ran out"):
        group.receive(torch.empty(1), out_of_time())
    assert aborted == [pg]
    assert not group.is_waiting
    with pytest.raises(Refused, match="is broken"):
        group.receive(torch.empty(1), out_of_time())
    # the group is gone already
    group.leave()
    assert aborted == [pg]


def test_failed_broadcast_is_refused(monkeypatch: pytest.MonkeyPatch, aborted: list[Any]) -> None:
    pg: Any = object()
    broadcast(monkeypatch, Broadcast(RuntimeError("remote process exited\nmore")))
    with pytest.raises(Refused, match=r"'g' failed: remote process exited$"):
        Group("g", Formed(pg, HashStore())).receive(torch.empty(1), check=lambda: None)
    assert aborted == [pg]


class Communicator:
    """A communicator made in the first broadcast, blocked there for its peers, like NCCL's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._peers_come = threading.Event()
        self.is_waited_for = threading.Event()
        self.aborted = threading.Event()
        monkeypatch.setattr(dist, "broadcast", self._broadcast)

    def _broadcast(self, *args: Any, **kwargs: Any) -> Broadcast:
        self.is_waited_for.set()
        self._peers_come.wait()
        return Broadcast()

    def admit_peers(self) -> None:
        self._peers_come.set()

    def abort(self) -> None:
        self.aborted.set()


def expect_lost(group: Group, communicator: Communicator, aborted: list[Any]) -> None:
    """Expect the communicator to be kept while a thread is in it, and then aborted."""
    group.leave()
    group.retire("a newer group takes its name")
    assert (group.is_waiting, aborted, communicator.aborted.is_set()) == (True, [], False)
    with pytest.raises(Refused, match="is broken"):
        group.receive(torch.empty(1), check=lambda: None)
    communicator.admit_peers()
    assert communicator.aborted.wait(timeout=30)
    assert aborted == []


def test_communicator_without_peers_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, aborted: list[Any]
) -> None:
    communicator: Any = Communicator(monkeypatch)
    group = Group("g", Formed(communicator, HashStore()))
    with pytest.raises(Dropped, match="time ran out"):
        group.receive(torch.empty(1), out_of_time())
    assert group.describe() == "broken: the update's time ran out"
    expect_lost(group, communicator, aborted)


def test_group_is_left_while_its_communicator_waits(
    monkeypatch: pytest.MonkeyPatch, aborted: list[Any]
) -> None:
    communicator: Any = Communicator(monkeypatch)
    group = Group("g", Formed(communicator, HashStore()))
    said: list[str] = []

    def receive() -> None:
        with pytest.raises(Refused) as refused:
            group.receive(torch.empty(1), check=lambda: None)
        said.append(str(refused.value))

    thread = threading.Thread(target=receive)
    thread.start()
    assert communicator.is_waited_for.wait(timeout=30)
    group.retire("a newer group takes its name")
    thread.join()
    assert said == ["group 'g' was left: a newer group takes its name"]
    expect_lost(group, communicator, aborted)


def test_name_of_a_lost_group_can_be_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    def form() -> dist.ProcessGroup:
        return construct("gloo", HashStore(), name="lost", rank=0, world_size=1, timeout=RENDEZVOUS)

    waits = Communicator(monkeypatch)
    lost = Group("lost", Formed(form(), HashStore()))
    with pytest.raises(Dropped):
        lost.receive(torch.empty(1), out_of_time())
    dist.destroy_process_group(form())
    waits.admit_peers()


# ---- many broadcasts ---------------------------------------------------------------------


class Wire:
    """The wire from a trainer to this rank. A posted broadcast ends at the trainer's ``send``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
        self.posted: list[torch.Tensor] = []
        self.most_posted = 0
        self._came = 0
        monkeypatch.setattr(dist, "get_backend", lambda group: backend)
        monkeypatch.setattr(dist, "broadcast", self._broadcast)

    def _broadcast(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
        self.posted.append(tensor)
        self.most_posted = max(self.most_posted, len(self.posted) - self._came)
        number = len(self.posted)
        return SimpleNamespace(
            is_completed=lambda: self._came >= number,
            exception=lambda: None,
            wait=lambda: tensor.fill_(number),
        )

    def send(self) -> None:
        """Send the trainer's next broadcast."""
        self._came += 1


def buffers(count: int, nbytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(count):
        buffer = torch.zeros(nbytes, dtype=torch.uint8)
        yield buffer, buffer


@pytest.mark.parametrize(
    ("backend", "count", "nbytes", "most"),
    [
        ("nccl", 100, 1, groups.WINDOW_COUNT),
        ("nccl", 10, groups.WINDOW_BYTES // 4, 4),
        ("nccl", 3, 2 * groups.WINDOW_BYTES, 1),
        ("glass", 100, 1, groups.WINDOW_COUNT),
        # gloo's time limit counts from the post
        ("gloo", 10, 1, 1),
    ],
)
def test_broadcasts_are_posted_a_window_ahead(
    monkeypatch: pytest.MonkeyPatch, backend: str, count: int, nbytes: int, most: int
) -> None:
    wire = Wire(monkeypatch, backend)
    pg: Any = object()
    group = Group("g", Formed(pg, HashStore()))
    expected = buffers(count, nbytes)
    found = [int(tensor[0]) for tensor in group.receive_each(expected, wire.send)]
    assert found == list(range(1, count + 1))
    assert wire.most_posted == most
    assert not group.is_waiting


def test_drop_aborts_broadcasts_posted_ahead(
    monkeypatch: pytest.MonkeyPatch, aborted: list[Any]
) -> None:
    wire = Wire(monkeypatch, "nccl")
    pg: Any = object()
    group = Group("g", Formed(pg, HashStore()))
    with pytest.raises(Dropped):
        list(group.receive_each(buffers(10, 1), out_of_time()))
    assert (len(wire.posted), aborted, group.is_waiting) == (10, [pg], False)


def test_completed_broadcast_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a poll every few ms, thousands of small broadcasts would take minutes."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    wire = Wire(monkeypatch, "nccl")
    asked = iter(range(10**6))

    def check() -> None:
        if next(asked) % 3 == 2:
            wire.send()

    pg: Any = object()
    list(Group("g", Formed(pg, HashStore())).receive_each(buffers(100, 1), check))
    assert max(slept) <= 8 * groups.FIRST_POLL_S


def test_absent_trainer_is_polled_rarely(
    monkeypatch: pytest.MonkeyPatch, aborted: list[Any]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    Wire(monkeypatch, "nccl")
    asked = iter(range(10**6))

    def check() -> None:
        if next(asked) == 100:
            raise Dropped("the update's time ran out")

    pg: Any = object()
    with pytest.raises(Dropped):
        list(Group("g", Formed(pg, HashStore())).receive_each(buffers(1, 1), check))
    assert slept[-1] == groups.LAST_POLL_S
