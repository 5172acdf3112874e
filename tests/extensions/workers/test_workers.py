"""A server with two tokenizer workers: each worker takes each call, and both agree."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from harness import marker
from harness.server import Server, for_the_answer, schedulers
from tests.support import faults
from tests.support.load import (
    ENDLESS,
    Generation,
    expect_aborted,
    expect_all_go_on,
    expect_whole,
    more_tokens,
    pause,
    resume,
    settle,
    start_running,
    status,
    until,
    update,
    versions_of,
)
from tests.support.pool import FLAVOURS, ServerPool
from tests.support.updates import (
    LIVE,
    Call,
    Sender,
    empty_rendezvous,
    expect_to_run_on,
    refuse,
    serving,
    staging,
    succeed,
    tensor_body,
)
from tests.support.workers import via_worker, workers

pytest_plugins = ["tests.support.fixtures"]


FLAVOURS["faulty_workers_server"] = replace(
    FLAVOURS["workers_server"], env=FLAVOURS["workers_server"].env | faults.ENV
)
FLAVOURS["granian_server"] = replace(
    FLAVOURS["workers_server"], flags=(*FLAVOURS["workers_server"].flags, "--enable-http2")
)


@pytest.fixture
def via_workers(workers_server: Server) -> Iterator[list[Server]]:
    yield from via_workers_of(workers_server)


def via_workers_of(server: Server) -> Iterator[list[Server]]:
    """Yield the same server once for each worker, as a client reaching only that worker."""
    until("there are two workers", lambda: len(workers(server)) == 2)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(via_worker(server, worker)) for worker in workers(server)]


@pytest.fixture
def via_granian_workers(pool: ServerPool) -> Iterator[list[Server]]:
    yield from via_workers_of(pool.get(FLAVOURS["granian_server"]))
    pool.restore()


def start_on_both(via_workers: list[Server], tokens: int = ENDLESS) -> list[Generation]:
    return [one for server in via_workers for one in start_running(server, 1, tokens=tokens)]


def expect_version_everywhere(via_workers: list[Server], version: str) -> None:
    """Check that each worker reports this version, in its status and in its answers."""
    for server in via_workers:
        assert server.get("/model_info")["weight_version"] == version
        assert server.get("/get_weight_version")["weight_version"] == version
        output = Generation(server, tokens=2, stream=False).output()
        assert output.meta["weight_version"] == version
        assert versions_of(output) == [version]


def has_ended(process: psutil.Process) -> bool:
    # the process stays a zombie until its parent collects the exit code
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def is_ready(server: Server) -> bool:
    return bool(server.get("/ready")["status_code"] == 200)


def test_both_workers_authenticate_and_refuse_alike(via_workers: list[Server]) -> None:
    assert len(via_workers) == 2
    assert serving(via_workers[0]) == serving(via_workers[1])
    for server in via_workers:
        assert server.post("/flush_cache", headers={})["status_code"] == 401
        assert server.post("/pause_generation", {}, headers={})["status_code"] == 401
        assert server.post("/flush_cache")["status_code"] == 200
        refuse(server.post("/pause_generation", {"mode": "never"}), "mode")
        adapter = {"lora_name": "a", "lora_path": "nowhere"}
        refuse(server.post("/load_lora_adapter", adapter), "--enable-lora")


def test_vllm_routes_work_on_both_workers(via_workers: list[Server]) -> None:
    """The worker itself serves the generating routes."""
    one, other = via_workers
    assert one.post("/pause?mode=keep", {})["status"] == "paused"
    assert other.get("/is_paused")["is_paused"]
    assert other.post("/resume")["status"] == "resumed"
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "temperature": 0}}
    for server in via_workers:
        assert server.post("/inference/v1/generate", body)["usage"]["completion_tokens"] == 2
        assert len(server.post("/skyrl/v1/generate", body)["choices"][0]["token_ids"]) == 2


def test_abort_reaches_a_request_of_the_other_worker(via_workers: list[Server]) -> None:
    """An abort ends one request, or a whole group, by either route."""
    one, other = via_workers
    named = [Generation(other, tokens=ENDLESS, rid=name) for name in ("a", "a1", "a10")]
    group = Generation(other, tokens=ENDLESS, rid="group", n=3)
    more_tokens(named)
    group.wait_for_tokens(3)
    assert one.post("/abort_request", {"rid": "a1"}, headers={})["status_code"] == 401
    refuse(one.post("/abort_request", {"rid": ["a1"]}), "rid")
    assert one.post("/abort_request", {"rid": "a1"}) == {"status_code": 200, "text": ""}
    expect_aborted(named[1])
    unknown = ["gro", "other"]
    assert one.post("/abort_requests", {"request_ids": unknown})["aborted"] == 0
    assert one.post("/abort_requests", {"request_ids": ["group", *unknown]})["aborted"] == 3
    assert [output.finish_reason for output in group.outputs()] == ["abort"] * 3
    expect_all_go_on([named[0], named[2]])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_request_id_in_use_at_the_other_worker_is_refused(
    via_workers: list[Server], *, stream: bool
) -> None:
    """The first request and the detokenizer go on."""
    one, other = via_workers
    first = Generation(one, tokens=ENDLESS, rid="name")
    first.wait_for_tokens(3)
    second = Generation(other, tokens=ENDLESS, rid="name", stream=stream)
    second.wait_for_end()
    if stream:
        (output,) = second.outputs()
        assert output.meta["finish_reason"]["status_code"] == 400
        said = output.meta["finish_reason"]["message"]
    else:
        assert (second.status, second.count) == (400, 0)
        said = second.refusal or ""
    assert "Duplicate request ID detected: name" in said
    expect_all_go_on([first])
    third = Generation(other, tokens=ENDLESS, rid="name")
    third.wait_for_tokens(3)
    expect_all_go_on([third])


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_freezing_pause_holds_requests_of_both_workers(
    via_workers: list[Server], mode: str
) -> None:
    one, other = via_workers
    running = start_on_both(via_workers)
    grant = pause(one, mode)
    assert sum(rank["running"] + rank["retracted"] for rank in grant["ranks"]) == 2
    settle(other, running)
    for server in via_workers:
        assert status(server)["mode"] == mode
        assert not is_ready(server)
    comment = f": paused mode={mode}"
    until("both streams say so", lambda: all(comment in each.comments for each in running))
    assert not resume(other, pause_id=grant["pause_id"])["paused"]
    more_tokens(running)
    assert all(map(is_ready, via_workers))
    expect_all_go_on(running)


def test_aborting_pause_ends_requests_of_both_workers(via_workers: list[Server]) -> None:
    one, other = via_workers
    running = start_on_both(via_workers)
    grant = pause(one, "abort")
    assert grant["ranks"][0]["aborted"] == 2
    for generation in running:
        expect_aborted(generation)
    late = Generation(other, tokens=3)
    assert not resume(other)["paused"]
    expect_whole(late)


def test_wait_pause_lets_requests_of_both_workers_end(via_workers: list[Server]) -> None:
    one, other = via_workers
    running = start_on_both(via_workers, tokens=60)
    pause(other, "wait")
    for generation in running:
        expect_whole(generation)
    resume(one)


def test_expired_lease_makes_both_workers_ready(via_workers: list[Server]) -> None:
    """No call tells the workers."""
    one, other = via_workers
    running = start_on_both(via_workers)
    pause(one, "in_place", lease_s=0.2)
    until("both are ready", lambda: is_ready(one) and is_ready(other))
    more_tokens(running)
    expect_all_go_on(running)


@pytest.mark.parametrize("source", ["disk", "tensor", "distributed", "ipc"])
def test_update_is_known_to_both_workers(
    via_workers: list[Server], sender: Sender, source: str
) -> None:
    one, other = via_workers
    running = start_on_both(via_workers)
    with sender.ready(one, source, 1) as send:
        receipt = succeed(send(**LIVE, weight_version="v1"))
    assert (receipt["base_version"], receipt["weight_version"]) == ("v0", "v1")
    expect_version_everywhere([other, one], "v1")
    expect_to_run_on(other, running, [0, 1])


def test_recompute_and_rollback_reach_requests_of_both_workers(
    via_workers: list[Server], sender: Sender
) -> None:
    one, other = via_workers
    running = start_on_both(via_workers)
    recompute: dict[str, Any] = {
        "non_blocking": True,
        "kv_cache": "recompute",
        "weight_version": "v2",
    }
    assert succeed(sender.send(one, "disk", 2, **recompute))["retracted"] == 2
    more_tokens(running)
    succeed(other.post("/inflight/rollback", {"expected_version": "v2"}))
    expect_version_everywhere(via_workers, "v0")
    more_tokens(running)
    for generation in running:
        generation.abort()
        assert versions_of(expect_aborted(generation)) == ["v0", "v2", "v0"]


def test_blocking_update_waits_for_requests_of_the_other_worker(
    via_workers: list[Server], sender: Sender
) -> None:
    """SGLang's own blocking update waits for its worker's requests only."""
    one, other = via_workers
    (running,) = start_running(other, 1, tokens=150)
    succeed(sender.send(one, "disk", 1, flush_cache=False, weight_version="v1"))
    assert versions_of(expect_whole(running)) == ["v0"]
    expect_version_everywhere(via_workers, "v1")


def halves(version: int) -> list[dict[str, Any]]:
    items = list(marker.tensors(version).items())
    return [dict(items[: len(items) // 2]), dict(items[len(items) // 2 :])]


def test_session_takes_pieces_through_both_workers(via_workers: list[Server]) -> None:
    one, other = via_workers
    running = start_on_both(via_workers)
    session = succeed(one.post("/begin_weight_update", {"non_blocking": True}))["session_id"]
    busy = {"model_path": "nowhere", "on_busy": "refuse", **LIVE}
    refuse(other.post("/update_weights_from_disk", busy), "another", status_code=409)
    for server, half in zip([other, one], halves(1), strict=True):
        body = tensor_body(half, session_id=session, **LIVE)
        succeed(server.post("/update_weights_from_tensor", body))
    succeed(other.post("/seal_weight_update", {"session_id": session}))
    end = {"session_id": session, "weight_version": "v1", **LIVE}
    succeed(one.post("/end_weight_update", end))
    expect_version_everywhere(via_workers, "v1")
    expect_to_run_on(one, running, [0, 1])


def test_memory_release_is_known_to_both_workers(
    via_workers: list[Server], checkpoints: Path
) -> None:
    """No worker is ready while weights are hollow."""
    one, other = via_workers
    running = start_on_both(via_workers)
    pause(one, "retract")
    succeed(one.post("/release_memory_occupation", {"keep_weights": "discard"}))
    assert all(status(server)["memory"]["weights"] == "lost" for server in via_workers)
    assert succeed(other.post("/resume_memory_occupation", {}))["hollow"] is not None
    update(other, checkpoints, 1, non_blocking=True)
    assert not any(map(is_ready, via_workers))
    resume(one)
    assert all(map(is_ready, via_workers))
    expect_version_everywhere(via_workers, "v1")
    expect_to_run_on(other, running, [0, 1])

    succeed(one.post("/release_memory_occupation", {"tags": ["weights"]}))
    succeed(other.post("/resume_memory_occupation", {"tags": ["weights"]}))
    assert not any(map(is_ready, via_workers))
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
    for server in via_workers:
        assert server.post("/generate", body)["status_code"] == 503
    update(other, checkpoints, 2, non_blocking=True)
    assert all(map(is_ready, via_workers))
    expect_version_everywhere(via_workers, "v2")


def test_pause_is_released_when_the_caller_of_a_worker_leaves(via_workers: list[Server]) -> None:
    """The worker tells the owner, which releases the pause."""
    one, other = via_workers
    (running,) = start_running(other, 1, tokens=ENDLESS)
    with pytest.raises(httpx.ReadTimeout):
        one.post("/pause_generation", {"mode": "wait"}, timeout=for_the_answer(0.5))
    until("no pause is held", lambda: status(other)["holders"] == [])
    expect_all_go_on([running])


def test_version_name_reaches_both_workers_after_its_caller_left(
    workers_server: Server, via_workers: list[Server]
) -> None:
    """The rank renames its weights later, when no caller waits for the answer."""
    (rank,) = schedulers(workers_server.process.pid)
    rank.suspend()
    try:
        with pytest.raises(httpx.TimeoutException):
            via_workers[0].post(
                "/update_weight_version", {"new_version": "named"}, timeout=for_the_answer(1)
            )
    finally:
        rank.resume()
    paths = ("/get_weight_version", "/model_info", "/inflight/status")

    def names() -> set[str]:
        return {each.get(path)["weight_version"] for path in paths for each in via_workers}

    until("it is the one name", lambda: names() == {"named"})


def test_dead_worker_loses_its_calls_and_no_session(
    workers_server: Server, via_workers: list[Server], checkpoints: Path, sender: Sender
) -> None:
    """The replacing worker knows the current state."""
    one, other = via_workers
    (running,) = start_running(other, 1, tokens=ENDLESS)
    succeed(sender.send(one, "disk", 1, weight_version="v1", **LIVE))
    # waits for the running request
    blocking = {"model_path": str(checkpoints / "v2"), "weight_version": "v2"}
    call = Call.of(lambda: one.post("/update_weights_from_disk", blocking))
    until("it waits", lambda: status(other)["state"] == "draining")
    first, second = workers(workers_server)
    first.kill()
    until("it is given up", lambda: status(other)["state"] == "running")
    assert not isinstance(call._answer, dict)

    session = succeed(other.post("/begin_weight_update", {"non_blocking": True}))["session_id"]
    until("there are two again", lambda: len(workers(workers_server)) == 2)
    (new,) = (worker for worker in workers(workers_server) if worker != second)
    with via_worker(workers_server, new) as renewed:
        assert renewed.get("/model_info")["weight_version"] == "v1"
        assert [rank["state"] for rank in staging(renewed)] == ["open"]
        body = tensor_body(marker.tensors(3), session_id=session, **LIVE)
        succeed(renewed.post("/update_weights_from_tensor", body))
        second.kill()
        end = {"session_id": session, "weight_version": "v3", **LIVE}
        succeed(renewed.post("/end_weight_update", end))
        expect_version_everywhere([renewed], "v3")
    assert running.output_so_far().endings == 0


def test_worker_failing_to_apply_a_state_is_replaced(pool: ServerPool, sender: Sender) -> None:
    """Such a worker would report an old version for ever."""
    server = pool.get(FLAVOURS["faulty_workers_server"])
    with contextlib.contextmanager(via_workers_of)(server) as (_, other):
        (running,) = start_running(other, 1, tokens=ENDLESS)
        first, second = workers(server)
        injected = faults.Faults()
        injected.inject("news", "raise", pid=first.pid)
        try:
            succeed(sender.send(other, "disk", 1, weight_version="v1", **LIVE))
            until("it has gone", lambda: has_ended(first))
            until("there are two again", lambda: len(workers(server)) == 2)
        finally:
            injected.clear()
        (new,) = (worker for worker in workers(server) if worker != second)
        with via_worker(server, new) as renewed:
            expect_version_everywhere([renewed, other], "v1")
        expect_to_run_on(other, [running], [0, 1])
    assert "cannot follow" in server.log_text()
    pool.restore()


@pytest.mark.parametrize("process", ["scheduler", "detokenizer"])
def test_dead_scheduler_or_detokenizer_ends_the_server(pool: ServerPool, process: str) -> None:
    """The exit code reports the failure, as with a single worker."""
    server = pool.get(FLAVOURS["workers_server"])
    children = psutil.Process(server.process.pid).children(recursive=True)
    (failing,) = (each for each in children if f"sglang::{process}" in " ".join(each.cmdline()))
    failing.kill()
    until("the server has ended", lambda: not server.is_alive())
    assert server.process.returncode != 0
    until("none of it is left", lambda: all(map(has_ended, children)))
    pool.discard()


def test_workers_end_when_the_owner_dies(pool: ServerPool) -> None:
    """The owner is in the launched process, and only the owner knows the served version."""
    server = pool.get(FLAVOURS["workers_server"])
    until("there are two workers", lambda: len(workers(server)) == 2)
    orphans = workers(server)
    server.process.kill()
    until("they have gone", lambda: all(map(has_ended, orphans)))
    pool.discard()


def test_sigterm_to_a_worker_lets_its_requests_end(
    workers_server: Server, via_workers: list[Server]
) -> None:
    """A new worker replaces it, and the server survives later deaths of workers."""
    one, other = via_workers
    (running,) = start_running(other, 1, tokens=ENDLESS)
    (its_own,) = start_running(one, 1, tokens=120)
    grant = pause(other, "in_place")
    settle(other, [running, its_own])
    assert its_own.count < its_own.max_new_tokens
    first, second = workers(workers_server)
    first.send_signal(signal.SIGTERM)
    until("it has heard", lambda: "SIGTERM received" in workers_server.log_text())
    assert status(other)["mode"] == "in_place"
    resume(other, pause_id=grant["pause_id"])
    expect_whole(its_own)
    until("it has gone", lambda: has_ended(first))
    until("there are two again", lambda: len(workers(workers_server)) == 2)
    (new,) = (worker for worker in workers(workers_server) if worker != second)
    with via_worker(workers_server, new) as renewed:
        pause(renewed, "in_place")
        settle(renewed, [running])
        resume(other)
    expect_all_go_on([running])
    for worker in (new, second):
        worker.kill()
    until("they have gone", lambda: has_ended(new) and has_ended(second))
    until("there are two others", lambda: len(workers(workers_server)) == 2)
    expect_whole(Generation(workers_server, tokens=3))


def test_sigterm_to_the_server_ends_pauses_so_that_requests_end(
    workers_server: Server, via_workers: list[Server], pool: ServerPool
) -> None:
    """The worker whose requests end first does not end the server."""
    one, other = via_workers
    running = [*start_running(other, 1, tokens=160), *start_running(one, 1, tokens=90)]
    pause(one, "in_place")
    settle(other, running)
    assert all(generation.count < generation.max_new_tokens for generation in running)
    workers_server.process.send_signal(signal.SIGTERM)
    for generation in running:
        expect_whole(generation)
    pool.discard()


@pytest.mark.parametrize("flavour", ["workers_server", "granian_server"])
def test_sigterm_to_the_server_answers_waiting_calls_of_all_workers(
    pool: ServerPool, flavour: str
) -> None:
    """One worker never had a request."""
    pool.discard()
    server = pool.get(FLAVOURS[flavour])
    with contextlib.contextmanager(via_workers_of)(server) as via_workers:
        calls = [
            Call(one, "/init_weights_update_group", {**empty_rendezvous(), "group_name": name})
            for one, name in zip(via_workers, ("one", "other"), strict=True)
        ]
        until("the ranks wait for both", lambda: len(staging(server)[0]["groups"]) == 2)
        server.process.send_signal(signal.SIGTERM)
        for call in calls:
            answer = call.answer()
            assert answer["status_code"] == 504, answer
            assert "the server was shut down" in answer["message"]
    until("it has gone", lambda: not server.is_alive())
    # the owner waits for no worker without a request
    assert "have not acked" not in server.log_text()
    pool.discard()


def test_granian_workers_pause_and_update(
    via_granian_workers: list[Server], sender: Sender
) -> None:
    """Granian starts workers differently from uvicorn, and they share no socket."""
    one, other = via_granian_workers
    running = start_on_both(via_granian_workers, tokens=150)
    pause(other, "in_place")
    settle(one, running)
    succeed(sender.send(one, "tensor", 1, weight_version="v1", **LIVE))
    resume(other)
    for generation in running:
        expect_whole(generation)
    expect_version_everywhere(via_granian_workers, "v1")


def test_contract_and_rejection_hold_on_both_workers(
    via_workers: list[Server], checkpoints: Path
) -> None:
    """The owner tells each worker what is served, before it answers."""
    one, other = via_workers
    epoch = status(one)["epoch"]
    held = [Generation(server, tokens=2, min_epoch=epoch + 1) for server in via_workers]
    update(one, checkpoints, 1, non_blocking=True)
    for generation in held:
        assert generation.output().tokens == [marker.token(1)] * 2
    for server in via_workers:
        wait = f"/inflight/wait?epoch={epoch + 1}&weight_version=v1&timeout_s=0"
        assert server.get(wait)["epoch"] == epoch + 1
        at_once = Generation(
            server, tokens=2, stream=False, exact_weight_version="v1", version_timeout_s=0
        )
        assert at_once.output().tokens == [marker.token(1)] * 2
    pause(one, "in_place", new_requests="reject")
    for server in via_workers:
        refused = Generation(server, tokens=2)
        refused.wait_for_end()
        assert (refused.status, refused.count) == (503, 0)
    # a lease ends without a call
    pause(other, "in_place", new_id="leased", lease_s=0.3)
    resume(other)
    for server in via_workers:
        assert Generation(server, tokens=2).output().tokens == [marker.token(1)] * 2


def test_abort_ends_a_wait_on_the_other_worker(via_workers: list[Server]) -> None:
    one, other = via_workers
    held = Generation(other, tokens=2, rid="held", exact_weight_version="v1")

    def has_ended() -> bool:
        one.post("/abort_request", {"rid": "held"})
        return held.has_ended

    until("the abort arrives", has_ended)
    assert "aborted while it waited" in (held.refusal or "")
