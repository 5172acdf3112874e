"""A rank, a trainer or a caller fails in the middle of an update: the old version serves on."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from harness import marker
from harness.server import Server, for_the_answer, schedulers
from harness.trainer import Trainer, Trainers, layout
from tests.support.faults import Faults, Kind, Phase
from tests.support.load import Generation, start_running, status, until
from tests.support.resident import resident
from tests.support.updates import (
    ENDLESS,
    Call,
    Sender,
    empty_rendezvous,
    expect_to_run_on,
    refuse,
    says,
    serving,
    staging,
    succeed,
    tensor_body,
    until_idle,
    until_staging,
)

pytest_plugins = ["tests.support.fixtures"]

LIVE: dict[str, Any] = {"non_blocking": True, "flush_cache": False}
V1: dict[str, Any] = {**LIVE, "weight_version": "v1"}
DISTRIBUTED = "/update_weights_from_distributed"
JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
# for an update that nobody will ever complete
SHORT_S = 1.0

PHASES: tuple[Phase, ...] = ("first", "middle", "vote")
KINDS: tuple[Kind, ...] = ("raise", "hang", "hang_deaf")
FAULTS: list[tuple[Phase, Kind]] = [*itertools.product(PHASES, KINDS), ("middle", "wrong_tensor")]


@contextlib.contextmanager
def nothing_changes(server: Server) -> Iterator[list[Generation]]:
    """Requests run through the block on the old weights, and see the next update."""
    running = start_running(server, 2, tokens=ENDLESS)
    before = serving(server)
    yield running
    until_idle(server)
    assert serving(server) == before
    for generation in running:
        generation.wait_for_tokens(generation.count + 3)
        assert set(generation.tokens) == {marker.token(0)}
    says(server, 0)


@pytest.mark.parametrize(("phase", "kind"), FAULTS)
def test_rank_fails(
    faulty_server: Server, sender: Sender, faults: Faults, phase: Phase, kind: Kind
) -> None:
    server = faulty_server
    with nothing_changes(server) as running:
        faults.inject(phase, kind)
        if kind == "hang_deaf":
            expect_deaf(server, sender, faults)
        else:
            answer = sender.send(server, "disk", 1, **V1, timeout_s=SHORT_S)
            words = {"raise": "injected fault", "hang": "time ran out", "wrong_tensor": "shape"}
            refuse(answer, words[kind])
        faults.clear()
    succeed(sender.send(server, "disk", 1, **V1))
    expect_to_run_on(server, running, [0, 1])


def test_requests_that_come_amid_staging(
    faulty_server: Server, sender: Sender, faults: Faults
) -> None:
    """They are made as ever: SGLang keeps their biases in torch's default dtype, the process's."""
    server = faulty_server
    expect_fine_biases(server)
    faults.inject("middle", "hang")
    with sender.ready(server, "disk", 1) as send:
        call = Call.of(lambda: send(**V1))
        until_staging(server, tensors=1)
        expect_fine_biases(server)
        assert not call.is_answered, call.answer()
        faults.clear()
        succeed(call.answer())
    expect_fine_biases(server)


def expect_fine_biases(server: Server) -> None:
    """Biases differ by less than bfloat16 can tell, and the greater wins."""
    for winner, loser in itertools.permutations([300, 301]):
        biases = {str(winner): 100.2, str(loser): 100.0}
        tokens = Generation(server, tokens=1, sampling={"logit_bias": biases}).output().tokens
        assert tokens == [winner]


def expect_deaf(server: Server, sender: Sender, faults: Faults) -> None:
    """A staging thread that hears nothing keeps its own update waiting, and nothing else."""
    with sender.ready(server, "disk", 1) as send:
        call = Call.of(lambda: send(**V1, timeout_s=SHORT_S))
        until_staging(server)
        # the front end gives the rank up some seconds after its time
        until_idle(server)
        assert not call.is_answered, call.answer()
        faults.clear()
        refuse(call.answer(), "rank dp0 pp0 tp0", status_code=504)


# what calls that send the whole checkpoint v1 run into
FAILURES: dict[str, tuple[Phase, Kind] | None] = {
    "unknown name": None,
    "exception": ("middle", "raise"),
    "wrong tensor": ("middle", "wrong_tensor"),
    "hang": ("vote", "hang"),
}


@pytest.mark.parametrize("failure", [*FAILURES, "dropped session"])
def test_failures_leave_no_memory(faulty_server: Server, faults: Faults, failure: str) -> None:
    server = faulty_server
    (scheduler,) = schedulers(server.process.pid)
    fault = FAILURES.get(failure)
    extra = {} if fault or failure not in FAILURES else {"no.such.weight": torch.ones(1 << 19)}
    fields = {**LIVE, "timeout_s": 0.2} if failure == "hang" else LIVE
    body = json.dumps(tensor_body({**marker.tensors(1), **extra}, **fields)).encode()
    if fault is not None:
        faults.inject(*fault)

    def fail_once(client: httpx.Client) -> None:
        if failure == "dropped session":
            client.post("/begin_weight_update", json={}).raise_for_status()
            client.post("/update_weights_from_tensor", content=body).raise_for_status()
            client.post("/abort_weight_update", json={}).raise_for_status()
            return
        answer = client.post("/update_weights_from_tensor", content=body)
        assert answer.status_code == 400, answer.text

    def fail(times: int) -> int:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for _ in range(times):
                fail_once(client)
        return resident(scheduler.pid)

    # until the allocator has all the room that it keeps
    before = fail(40)
    sent = 40 * len(body)
    grown = fail(40) - before
    assert grown < sent / 3, f"{grown >> 20} MiB more after failures of {sent >> 20} MiB in all"


class TestTrainer:
    """The trainer of a distributed update, which has sent some tensors of it."""

    @pytest.fixture
    def trainer(self, trainers: Trainers) -> Trainer:
        return trainers.get()

    @pytest.fixture
    def server(self, faulty_server: Server, trainer: Trainer) -> Iterator[Server]:
        trainer.join(faulty_server)
        yield faulty_server
        faulty_server.post(LEAVE, {})
        trainer.reset()

    def expect_recovery(
        self, server: Server, sender: Sender, trainer: Trainer, running: list[Generation]
    ) -> None:
        """The same group works when it was formed anew, with this trainer or another."""
        refuse(server.post(DISTRIBUTED, {**layout(1), **V1}), "is broken", "join anew")
        if trainer.is_alive:
            trainer.leave(server)
        else:
            succeed(server.post(LEAVE, {}))
        succeed(sender.send(server, "distributed", 1, **V1))
        expect_to_run_on(server, running, [0, 1])

    def test_killed(self, server: Server, sender: Sender, trainer: Trainer) -> None:
        with nothing_changes(server) as running:
            call = Call(server, DISTRIBUTED, {**layout(1), **V1})
            trainer.send(1, count=10)
            until_staging(server, tensors=10)
            trainer.close()
            refuse(call.answer(), "weight_update_group", "failed")
        self.expect_recovery(server, sender, trainer, running)

    def test_hangs(self, server: Server, sender: Sender, trainer: Trainer) -> None:
        with nothing_changes(server) as running:
            call = Call(server, DISTRIBUTED, {**layout(1), **V1, "timeout_s": SHORT_S})
            trainer.send(1, count=10)
            assert trainer.answer() == "sent"
            refuse(call.answer(), "time ran out")
        self.expect_recovery(server, sender, trainer, running)

    def test_hangs_in_a_session(self, server: Server, sender: Sender, trainer: Trainer) -> None:
        """The lease of a session ends it, also while a call of it waits for the trainer."""
        with nothing_changes(server) as running:
            succeed(server.post("/begin_weight_update", {"lease_s": SHORT_S}))
            call = Call(server, DISTRIBUTED, {**layout(1), **V1})
            trainer.send(1, count=10)
            assert trainer.answer() == "sent"
            refuse(call.answer(), "lease ran out")
        self.expect_recovery(server, sender, trainer, running)

    def test_sends_what_is_refused(self, server: Server, trainer: Trainer) -> None:
        """The rest is taken in, so trainer and group stay in step, and the next one works."""
        with nothing_changes(server) as running:
            trainer.send(1)
            wrong = layout(1)
            wrong["names"][2] = "no.such.weight"
            refuse(server.post(DISTRIBUTED, {**wrong, **V1}), "no.such.weight")
            assert trainer.answer() == "sent"
        trainer.send(2)
        second = {**layout(2), **LIVE, "weight_version": "v2"}
        succeed(server.post(DISTRIBUTED, second))
        assert trainer.answer() == "sent"
        expect_to_run_on(server, running, [0, 2])

    @pytest.mark.parametrize(
        ("flaw", "status_code"),
        [
            ({"expected_version": "v7"}, 409),
            ({"timeout_s": "soon"}, 400),
            ({"dtypes": []}, 400),
            # it waits for the requests that run
            ({"non_blocking": False, "timeout_s": 1}, 409),
        ],
        ids=["version", "body", "layout", "no time"],
    )
    def test_sends_for_a_call_that_is_refused(
        self,
        server: Server,
        sender: Sender,
        trainer: Trainer,
        flaw: dict[str, Any],
        status_code: int,
    ) -> None:
        """What it sent for the first call is not taken for the second one's."""
        with nothing_changes(server) as running:
            trainer.send(2)
            first = server.post(DISTRIBUTED, {**layout(2), **V1, **flaw})
            refuse(first, "out of step", "join anew", status_code=status_code)
            refuse(server.post(DISTRIBUTED, {**layout(1), **V1}), "is broken", "join anew")
        # it hangs in its first broadcast
        trainer.close()
        self.expect_recovery(server, sender, trainer, running)


@pytest.mark.parametrize("kills_first", [True, False], ids=["killed", "hangs, killed later"])
def test_dead_trainers_leave_nothing(
    faulty_server: Server, trainers: Trainers, kills_first: bool
) -> None:
    """No thread and no socket of a group stays for longer than its trainer lives."""
    server = faulty_server
    (scheduler,) = schedulers(server.process.pid)

    def fail_once() -> None:
        trainer = trainers.get()
        trainer.join(server)
        call = Call(server, DISTRIBUTED, {**layout(1), **V1, "timeout_s": SHORT_S})
        trainer.send(1, count=10)
        until_staging(server, tensors=10)
        if kills_first:
            trainer.close()
        refuse(call.answer(), "failed" if kills_first else "time ran out")
        succeed(server.post(LEAVE, {}))
        trainer.close()

    def fail(times: int) -> tuple[int, int]:
        for _ in range(times):
            fail_once()
        # what was left for later is looked after whenever a group is formed or left
        trainers.get().join(server)
        trainers.get().leave(server)
        return scheduler.num_fds(), scheduler.num_threads()

    before = fail(2)
    assert fail(3) == before


def test_trainer_that_never_comes(faulty_server: Server, sender: Sender) -> None:
    """A rendezvous ends in its time, and no update waits behind it."""
    server = faulty_server
    joining = Call(server, JOIN, empty_rendezvous())
    until("the ranks wait for the trainer", lambda: groups(server))
    succeed(sender.send(server, "disk", 1, **V1))
    assert not joining.is_answered
    refuse(joining.answer(), "was not formed", "nobody came")
    succeed(sender.send(server, "distributed", 2, **LIVE, weight_version="v2"))
    says(server, 2)


def test_caller_of_a_join_leaves(faulty_server: Server, trainers: Trainers) -> None:
    """Its rendezvous is given up, and another one can have its name."""
    server = faulty_server
    with pytest.raises(httpx.ReadTimeout):
        server.post(JOIN, empty_rendezvous(), timeout=for_the_answer(0.5))
    until("it is given up", lambda: not groups(server))
    trainers.get().join(server)
    trainers.get().leave(server)


def groups(server: Server) -> dict[str, str]:
    (staged,) = staging(server)
    found: dict[str, str] = staged["groups"]
    return found


@pytest.mark.parametrize("end", ["killed", "out of step"])
def test_group_of_no_use_gives_way(
    faulty_server: Server, sender: Sender, trainers: Trainers, end: str
) -> None:
    """Trainers that start again join under their constant name, and destroy nothing first."""
    server, trainer = faulty_server, trainers.get()
    trainer.join(server)
    if end == "out of step":
        # it has sent what nobody has taken, and is alive
        refuse(server.post(DISTRIBUTED, {**layout(1), **V1, "dtypes": []}), "out of step")
    else:
        trainer.close()
    trainers.close()
    trainer = trainers.get()
    trainer.join(server)
    trainer.send(1)
    succeed(server.post(DISTRIBUTED, {**layout(1), **V1}))
    assert trainer.answer() == "sent"
    says(server, 1)
    trainer.leave(server)


def test_group_of_use_does_not_give_way(
    faulty_server: Server, sender: Sender, trainers: Trainers
) -> None:
    server, trainer = faulty_server, trainers.get()
    trainer.join(server)
    refuse(server.post(JOIN, empty_rendezvous()), "is taken")
    trainer.send(1)
    succeed(server.post(DISTRIBUTED, {**layout(1), **V1}))
    assert trainer.answer() == "sent"
    trainer.leave(server)


def test_caller_leaves(faulty_server: Server, sender: Sender, trainers: Trainers) -> None:
    """Its update is dropped: nobody wants it, and it would hold up the next one."""
    server, trainer = faulty_server, trainers.get()
    with nothing_changes(server) as running:
        trainer.join(server)
        with pytest.raises(httpx.ReadTimeout):
            server.post(DISTRIBUTED, {**layout(2), **LIVE}, timeout=for_the_answer(0.5))
        until_idle(server)
    succeed(sender.send(server, "disk", 1, **V1, on_busy="refuse"))
    expect_to_run_on(server, running, [0, 1])
    trainer.leave(server)


def test_caller_leaves_amid_the_vote(
    faulty_server: Server, checkpoints: Path, faults: Faults
) -> None:
    server = faulty_server
    with nothing_changes(server):
        faults.inject("vote", "hang")
        body = {"model_path": str(checkpoints / "v1"), **V1}
        with pytest.raises(httpx.ReadTimeout):
            server.post("/update_weights_from_disk", body, timeout=for_the_answer(0.5))
        until_idle(server)
        faults.clear()


def test_commit_that_fails_in_its_middle(
    faulty_server: Server, checkpoints: Path, faults: Faults
) -> None:
    """The weights are swapped when the flush raises: the answer must not say that they are not."""
    server = faulty_server
    faults.inject("flush", "raise")
    body = {"model_path": str(checkpoints / "v1"), **V1, "flush_cache": True}
    answer = server.post("/update_weights_from_disk", body)
    faults.clear()
    refuse(answer, "new weights are in place", "'v1'", "injected fault", status_code=500)
    assert answer["error"]["type"] == "HalfDone"
    assert status(server)["weight_version"] == "v1"
    says(server, 1)
