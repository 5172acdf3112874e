"""A failing rank, trainer or caller amid an update leaves the old version in service."""

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
from tests.support.load import ENDLESS, Generation, start_running, status, until
from tests.support.resident import resident
from tests.support.updates import (
    LIVE,
    V1,
    Call,
    Sender,
    empty_rendezvous,
    expect_served,
    expect_to_run_on,
    refuse,
    serving,
    staging,
    succeed,
    tensor_body,
    until_idle,
    until_staging,
)

pytest_plugins = ["tests.support.fixtures"]

DISTRIBUTED = "/update_weights_from_distributed"
JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
# timeout of an update without an end
SHORT_S = 1.0

PHASES: tuple[Phase, ...] = ("first", "middle", "vote")
KINDS: tuple[Kind, ...] = ("raise", "hang", "hang_deaf")
FAULTS: list[tuple[Phase, Kind]] = [*itertools.product(PHASES, KINDS), ("middle", "wrong_tensor")]


@contextlib.contextmanager
def expect_no_change(server: Server) -> Iterator[list[Generation]]:
    """Check that requests run through the block on the old weights, and get the next update."""
    running = start_running(server, 2, tokens=ENDLESS)
    before = serving(server)
    yield running
    until_idle(server)
    assert serving(server) == before
    for generation in running:
        generation.wait_for_tokens(generation.count + 3)
        assert set(generation.tokens) == {marker.token(0)}
    expect_served(server, 0)


@pytest.mark.parametrize(("phase", "kind"), FAULTS)
def test_failing_rank_drops_the_update(
    faulty_server: Server, sender: Sender, faults: Faults, phase: Phase, kind: Kind
) -> None:
    server = faulty_server
    with expect_no_change(server) as running:
        faults.inject(phase, kind)
        if kind == "hang_deaf":
            expect_delay_of_its_update_only(server, sender, faults)
        else:
            answer = sender.send(server, "disk", 1, **V1, timeout_s=SHORT_S)
            words = {"raise": "injected fault", "hang": "time ran out", "wrong_tensor": "shape"}
            refuse(answer, words[kind])
        faults.clear()
    succeed(sender.send(server, "disk", 1, **V1))
    expect_to_run_on(server, running, [0, 1])


def test_requests_during_staging_keep_float32_biases(
    faulty_server: Server, sender: Sender, faults: Faults
) -> None:
    """SGLang takes the biases' dtype from torch's default, shared by all threads of the process."""
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
    """Check that the greater of two biases wins, though bfloat16 cannot tell them apart."""
    for winner, loser in itertools.permutations([300, 301]):
        biases = {str(winner): 100.2, str(loser): 100.0}
        tokens = Generation(server, tokens=1, sampling={"logit_bias": biases}).output().tokens
        assert tokens == [winner]


def expect_delay_of_its_update_only(server: Server, sender: Sender, faults: Faults) -> None:
    """Check that a hanging staging thread delays only its own update."""
    with sender.ready(server, "disk", 1) as send:
        call = Call.of(lambda: send(**V1, timeout_s=SHORT_S))
        until_staging(server)
        # the front end gives up some seconds after the update's timeout
        until_idle(server)
        assert not call.is_answered, call.answer()
        faults.clear()
        refuse(call.answer(), "rank dp0 pp0 tp0", status_code=504)


# faults for calls with the whole checkpoint v1
FAILURES: dict[str, tuple[Phase, Kind] | None] = {
    "unknown name": None,
    "exception": ("middle", "raise"),
    "wrong tensor": ("middle", "wrong_tensor"),
    "hang": ("vote", "hang"),
}


@pytest.mark.parametrize("failure", [*FAILURES, "dropped session"])
def test_failed_updates_leak_no_memory(faulty_server: Server, faults: Faults, failure: str) -> None:
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

    # repeat until the allocator has reached its full size
    before = fail(40)
    sent = 40 * len(body)
    grown = fail(40) - before
    assert grown < sent / 3, f"{grown >> 20} MiB more after failures of {sent >> 20} MiB in all"


class TestTrainer:
    """A distributed update's trainer fails after some tensors."""

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
        """Check that the group works once joined anew, by this trainer or another."""
        refuse(server.post(DISTRIBUTED, {**layout(1), **V1}), "is broken", "join anew")
        if trainer.is_alive:
            trainer.leave(server)
        else:
            succeed(server.post(LEAVE, {}))
        succeed(sender.send(server, "distributed", 1, **V1))
        expect_to_run_on(server, running, [0, 1])

    def test_killed_trainer_fails_its_update(
        self, server: Server, sender: Sender, trainer: Trainer
    ) -> None:
        with expect_no_change(server) as running:
            call = Call(server, DISTRIBUTED, {**layout(1), **V1})
            trainer.send(1, count=10)
            until_staging(server, tensors=10)
            trainer.close()
            refuse(call.answer(), "weight_update_group", "failed")
        self.expect_recovery(server, sender, trainer, running)

    def test_hanging_trainer_runs_into_the_timeout(
        self, server: Server, sender: Sender, trainer: Trainer
    ) -> None:
        with expect_no_change(server) as running:
            call = Call(server, DISTRIBUTED, {**layout(1), **V1, "timeout_s": SHORT_S})
            trainer.send(1, count=10)
            assert trainer.answer() == "sent"
            refuse(call.answer(), "time ran out")
        self.expect_recovery(server, sender, trainer, running)

    def test_session_lease_ends_a_call_that_waits_for_the_trainer(
        self, server: Server, sender: Sender, trainer: Trainer
    ) -> None:
        with expect_no_change(server) as running:
            succeed(server.post("/begin_weight_update", {"lease_s": SHORT_S}))
            call = Call(server, DISTRIBUTED, {**layout(1), **V1})
            trainer.send(1, count=10)
            assert trainer.answer() == "sent"
            refuse(call.answer(), "lease ran out")
        self.expect_recovery(server, sender, trainer, running)

    def test_refused_tensor_keeps_the_group_usable(self, server: Server, trainer: Trainer) -> None:
        """The rank receives the remaining tensors, so that the next broadcast matches."""
        with expect_no_change(server) as running:
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
            # this call waits for running requests
            ({"non_blocking": False, "timeout_s": 1}, 409),
        ],
        ids=["version", "body", "layout", "no time"],
    )
    def test_broadcasts_of_a_refused_call_do_not_reach_the_next_call(
        self,
        server: Server,
        sender: Sender,
        trainer: Trainer,
        flaw: dict[str, Any],
        status_code: int,
    ) -> None:
        with expect_no_change(server) as running:
            trainer.send(2)
            first = server.post(DISTRIBUTED, {**layout(2), **V1, **flaw})
            refuse(first, "out of step", "join anew", status_code=status_code)
            refuse(server.post(DISTRIBUTED, {**layout(1), **V1}), "is broken", "join anew")
        # the trainer hangs in its first broadcast
        trainer.close()
        self.expect_recovery(server, sender, trainer, running)


@pytest.mark.parametrize("kills_first", [True, False], ids=["killed", "hangs, killed later"])
def test_dead_trainers_leave_no_socket_and_no_thread(
    faulty_server: Server, trainers: Trainers, kills_first: bool
) -> None:
    server = faulty_server
    (scheduler,) = schedulers(server.process.pid)

    def fail_once() -> None:
        trainer = trainers.get()
        trainer.join(server)
        times_out = {} if kills_first else {"timeout_s": SHORT_S}
        call = Call(server, DISTRIBUTED, {**layout(1), **V1, **times_out})
        trainer.send(1, count=10)
        if kills_first:
            until_staging(server, tensors=10)
            trainer.close()
        refuse(call.answer(), "failed" if kills_first else "time ran out")
        succeed(server.post(LEAVE, {}))
        trainer.close()

    def fail(times: int) -> tuple[int, int]:
        for _ in range(times):
            fail_once()
        # forming or leaving a group cleans up what earlier groups left
        trainers.get().join(server)
        trainers.get().leave(server)
        return scheduler.num_fds(), scheduler.num_threads()

    before = fail(2)
    assert fail(3) == before


def test_join_without_a_trainer_times_out_and_delays_no_update(
    faulty_server: Server, sender: Sender
) -> None:
    server = faulty_server
    joining = Call(server, JOIN, empty_rendezvous())
    until("the ranks wait for the trainer", lambda: groups(server))
    succeed(sender.send(server, "disk", 1, **V1))
    assert not joining.is_answered
    refuse(joining.answer(), "was not formed", "nobody came")
    succeed(sender.send(server, "distributed", 2, **LIVE, weight_version="v2"))
    expect_served(server, 2)


def test_join_is_dropped_when_its_caller_leaves(faulty_server: Server, trainers: Trainers) -> None:
    """Another join can use the same name afterwards."""
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
def test_join_replaces_a_broken_group_of_the_same_name(
    faulty_server: Server, sender: Sender, trainers: Trainers, end: str
) -> None:
    """Restarted trainers join under a constant name without destroying the old group first."""
    server, trainer = faulty_server, trainers.get()
    trainer.join(server)
    if end == "out of step":
        # the trainer lives, and its broadcast is still to be received
        refuse(server.post(DISTRIBUTED, {**layout(1), **V1, "dtypes": []}), "out of step")
    else:
        trainer.close()
    trainers.close()
    trainer = trainers.get()
    trainer.join(server)
    trainer.send(1)
    succeed(server.post(DISTRIBUTED, {**layout(1), **V1}))
    assert trainer.answer() == "sent"
    expect_served(server, 1)
    trainer.leave(server)


def test_join_does_not_replace_a_working_group(
    faulty_server: Server, sender: Sender, trainers: Trainers
) -> None:
    server, trainer = faulty_server, trainers.get()
    trainer.join(server)
    refuse(server.post(JOIN, empty_rendezvous()), "is taken")
    trainer.send(1)
    succeed(server.post(DISTRIBUTED, {**layout(1), **V1}))
    assert trainer.answer() == "sent"
    trainer.leave(server)


def test_update_is_dropped_when_its_caller_leaves(
    faulty_server: Server, sender: Sender, trainers: Trainers
) -> None:
    """Otherwise the unwanted update would delay the next one."""
    server, trainer = faulty_server, trainers.get()
    with expect_no_change(server) as running:
        trainer.join(server)
        with pytest.raises(httpx.ReadTimeout):
            server.post(DISTRIBUTED, {**layout(2), **LIVE}, timeout=for_the_answer(0.5))
        until_idle(server)
    succeed(sender.send(server, "disk", 1, **V1, on_busy="refuse"))
    expect_to_run_on(server, running, [0, 1])
    trainer.leave(server)


def test_update_is_dropped_when_its_caller_leaves_during_the_vote(
    faulty_server: Server, checkpoints: Path, faults: Faults
) -> None:
    server = faulty_server
    with expect_no_change(server):
        faults.inject("vote", "hang")
        body = {"model_path": str(checkpoints / "v1"), **V1}
        with pytest.raises(httpx.ReadTimeout):
            server.post("/update_weights_from_disk", body, timeout=for_the_answer(0.5))
        until_idle(server)
        faults.clear()


def test_failing_flush_after_the_swap_reports_new_weights(
    faulty_server: Server, checkpoints: Path, faults: Faults
) -> None:
    """The swap has happened, so the error must not claim otherwise."""
    server = faulty_server
    faults.inject("flush", "raise")
    body = {"model_path": str(checkpoints / "v1"), **V1, "flush_cache": True}
    answer = server.post("/update_weights_from_disk", body)
    faults.clear()
    refuse(answer, "new weights are in place", "'v1'", "injected fault", status_code=500)
    assert answer["error"]["type"] == "HalfDone"
    assert status(server)["weight_version"] == "v1"
    expect_served(server, 1)
