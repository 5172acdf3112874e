"""Memory released while requests wait, and resumed later.

The reference platform protects released pages: an access ends the server, as on CUDA. So a server
alive at the end of this file has touched none of them.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.server import Server, schedulers, serve
from harness.starting import STEP_MS
from sglang_inflight.client import Client
from tests.support import memory_release
from tests.support.colocated_trainer import MODEL, ROUNDS, colocated_trainer
from tests.support.faults import Faults
from tests.support.load import (
    ENDLESS,
    Generation,
    ask,
    expect_all_go_on,
    expect_whole,
    more_tokens,
    pause,
    prompt,
    resume,
    settle,
    start_running,
    status,
    until,
    update,
    versions_of,
)
from tests.support.memory_release import bytes_of, release, resident, resume_memory
from tests.support.pool import ServerPool
from tests.support.resident import Resident
from tests.support.updates import (
    LIVE,
    expect_served,
    expect_to_run_on,
    message_of,
    refuse,
    serving,
    tensor_body,
)

pytest_plugins = ["tests.support.fixtures"]

KV, WEIGHTS = "kv_cache", "weights"
# tokens of a request ended by its test; the cache has room for two
LONG = 5000
# tokens of a request that outlasts a call
LASTING = 40
# slow steps take their time from no core, unlike more tokens of so many words
SLOW = {STEP_MS: "30"}


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the large markers v0, v1 and v2."""
    folder = tmp_path_factory.mktemp("large")
    for version in range(3):
        memory_release.MODEL.build(folder / f"v{version}", version)
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def one_server(
    request: pytest.FixtureRequest,
    pool: ServerPool,
    versions: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """A server that must survive all tests."""
    pool.discard()  # one server at a time
    log = tmp_path_factory.mktemp("logs") / "sleep.log"
    flags = (*memory_release.FLAVOUR.flags, "--tp-size", str(request.param))
    with serve(versions / "v0", *flags, log=log, env=memory_release.FLAVOUR.env | SLOW) as server:
        yield server
        assert server.is_alive(), server.log_text()[-4000:]


@pytest.fixture
def server(one_server: Server, versions: Path, faults: Faults) -> Iterator[Server]:
    """The server with all memory present, idle, serving version 0."""
    yield one_server
    faults.clear()
    one_server.post("/abort_weight_update", {})
    if missing := [kind for kind, where in memory(one_server).items() if where in ("away", "lost")]:
        resume_memory(one_server, *missing)
    one_server.post("/continue_generation", {})
    one_server.post("/abort_request", {"abort_all": True})
    update(one_server, versions, 0, non_blocking=True, kv_cache="recompute")
    assert set(memory(one_server).values()) == {"present"}
    until("nothing runs", lambda: not status(one_server)["running"])


def memory(server: Server) -> dict[str, str]:
    """Return the state of each kind of memory, alike on all ranks."""
    ranks = [dict(rank["memory"]) for rank in status(server)["ranks"]]
    assert all(rank == ranks[0] for rank in ranks), ranks
    del ranks[0]["hollow"]
    return ranks[0]


def fill_cache(server: Server) -> int:
    """Touch KV pages, not resident before, and return their bytes."""
    length = 3000
    generations = [Generation(server, tokens=2, input_ids=prompt(length)) for _ in range(3)]
    for generation in generations:
        generation.output()
    return 3 * length * memory_release.MODEL.token_bytes


ORDERS = [
    ((KV,), (KV,)),
    ((WEIGHTS,), (WEIGHTS,)),
    *itertools.product(
        [(KV, WEIGHTS), (WEIGHTS, KV), ("all at once",)],
        [(KV, WEIGHTS), (WEIGHTS, KV), ("all at once",)],
    ),
]


@pytest.mark.parametrize("keep", ["host", "discard"])
@pytest.mark.parametrize(("leave", "come"), ORDERS, ids="-".join)
def test_release_and_resume_in_every_order_keep_a_frozen_request(
    server: Server, versions: Path, keep: str, leave: tuple[str, ...], come: tuple[str, ...]
) -> None:
    """The request ends on the version served by then."""
    (frozen,) = start_running(server, 1, tokens=ENDLESS)
    pause(server, "retract")
    is_lost = keep == "discard" and leave != (KV,)
    for kinds in leave:
        both = kinds == "all at once"
        release(server, *((KV, WEIGHTS) if both else (kinds,)), keep_weights=keep)
    settle(server, [frozen])
    for kinds in come:
        moved = resume_memory(server, *((KV, WEIGHTS) if kinds == "all at once" else (kinds,)))
    assert (moved["hollow"] is not None) == is_lost
    assert moved["paused"] is True
    if is_lost:
        update(server, versions, 1, non_blocking=True, kv_cache="recompute")
    resume(server)
    expected = ["v0", "v1"] if is_lost else ["v0"]
    more_tokens([frozen])
    (output,) = expect_all_go_on([frozen])
    assert versions_of(output) == expected
    expect_served(server, 1 if is_lost else 0)


@pytest.mark.parametrize("keep", ["host", "discard"])
def test_released_memory_is_returned_and_resumed(server: Server, versions: Path, keep: str) -> None:
    # makes a shadow resident, too
    update(server, versions, 0, non_blocking=True, kv_cache="recompute")
    kv = fill_cache(server)
    served = serving(server)
    assert status(server)["staging"]["can_roll_back"] is True
    before = resident(server)
    released = release(server, KV, WEIGHTS, keep_weights=keep)
    fallen = before - resident(server)
    # the process takes some MB for other things meanwhile
    weights = 0.8 * memory_release.MODEL.weights_bytes
    assert fallen > 0.8 * kv + 2 * weights, released
    assert bytes_of(released, KV) > 0.8 * kv
    assert bytes_of(released, WEIGHTS) > weights
    assert bytes_of(released, "shadow") > weights
    assert all(rank["seconds"] > 0 for rank in released["ranks"])
    described = status(server)
    assert described["staging"]["can_roll_back"] is False
    assert described["previous_version"] is None
    resume_memory(server, WEIGHTS, KV)
    if keep == "discard":
        assert status(server)["digest"] is None
        # no shadow to write to
        update(server, versions, 0, **LIVE)
    expect_served(server, 0)
    if keep == "host":
        assert serving(server) == served


def test_update_works_between_resumed_weights_and_resumed_cache(
    server: Server, versions: Path
) -> None:
    """Trainers sharing the device resume the weights, update, then resume the cache."""
    frozen = start_running(server, 2, tokens=LONG)
    pause(server, "retract")
    release(server, keep_weights="discard")
    until("requests are frozen", lambda: status(server)["state"] == "frozen")
    resume_memory(server, WEIGHTS)
    receipt = update(server, versions, 1, flush_cache=False)
    assert receipt["weight_version"] == "v1"
    assert memory(server) == {"kv_cache": "away", "weights": "present", "cuda_graph": "away"}
    late = Generation(server, tokens=5)
    assert resume_memory(server, KV, "cuda_graph")["paused"] is True
    resume(server)
    assert versions_of(expect_whole(late)) == ["v1"]
    expect_to_run_on(server, frozen, [0, 1])


def test_weights_are_released_under_requests_that_keep_their_cache(server: Server) -> None:
    frozen = start_running(server, 2, tokens=LONG)
    pause(server, "in_place")
    for tags in ([KV], [], [KV, WEIGHTS]):
        answer = server.post("/release_memory_occupation", {"tags": tags})
        refuse(answer, "2 requests run", "retract", status_code=409)
    assert set(memory(server).values()) == {"present"}
    release(server, WEIGHTS, keep_weights="host")
    # released weights freeze even a pause of mode wait
    assert pause(server, "wait")["ranks"][0]["running"] == 2
    settle(server, frozen)
    resume_memory(server, WEIGHTS)
    resume(server)
    for output in expect_all_go_on(frozen):
        assert versions_of(output) == ["v0"]


def test_calls_while_memory_is_released_answer_correctly_or_409(
    server: Server, versions: Path
) -> None:
    (frozen,) = start_running(server, 1, tokens=LONG)
    pause(server, "retract")
    release(server, KV, WEIGHTS, keep_weights="discard")
    disk = {"model_path": str(versions / "v1")}
    ranks = len(status(server)["ranks"])
    for path, body in (
        ("/update_weights_from_disk", disk),
        ("/update_weights_from_disk", {**disk, "non_blocking": True, "flush_cache": False}),
        ("/update_weights_from_tensor", tensor_body({}, ranks=ranks, non_blocking=True)),
        ("/begin_weight_update", {"non_blocking": True}),
        ("/inflight/rollback", {}),
        ("/weights_checker", {"action": "checksum"}),
        ("/get_weights_by_name", {"name": "lm_head.weight"}),
        ("/release_memory_occupation", {"tags": [WEIGHTS]}),
        ("/release_memory_occupation", {}),
        ("/resume_memory_occupation", {"tags": ["cuda_graph"]}),
        ("/resume_memory_occupation", {}),
        ("/continue_generation", {}),
        ("/continue_generation", {"pause_id": "memory"}),
    ):
        answer = server.post(path, body)
        assert answer["status_code"] == 409, (path, body, answer)
        assert "release" in message_of(answer), (path, answer)
    granted: list[tuple[str, Any]] = [
        ("/flush_cache", None),
        ("/reset_prefix_cache?reset_running_requests=true", None),
        ("/update_weight_version", {"new_version": "v0", "abort_all_requests": False}),
        ("/pause_generation", {"mode": "in_place", "lease_s": 60}),
        ("/pause_generation", {"mode": "wait", "timeout_s": 5}),
    ]
    for path, body in granted:
        answer = server.post(path, body)
        assert answer["status_code"] == 200, (path, body, answer)
    for path in ("/health", "/health_generate", "/metrics", "/server_info", "/v1/models"):
        assert server.get(path)["status_code"] == 200, path
    assert server.get("/ready")["status_code"] == 503
    adapter = server.post("/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"})
    refuse(adapter, "/nowhere", status_code=404)
    holders = {holder["pause_id"] for holder in status(server)["holders"]}
    assert len(holders) == 4
    # later pauses are released; the memory's own pause and the first one remain
    answer = resume(server)
    assert answer["paused"] is True
    assert not frozen.has_ended
    frozen.abort()
    frozen.output()
    resume_memory(server, KV, WEIGHTS)


def test_expired_lease_does_not_resume_memory(server: Server) -> None:
    (frozen,) = start_running(server, 1, tokens=LONG)
    pause(server, "retract", lease_s=3)
    release(server, KV)
    until("the lease ran out", lambda: len(status(server)["holders"]) == 1)
    [holder] = status(server)["holders"]
    assert (holder["pause_id"], holder["lease_left_s"]) == ("memory", None)
    settle(server, [frozen])
    # no pause has a holder left
    assert resume_memory(server, KV)["paused"] is False
    expect_all_go_on([frozen])


def test_idle_server_releases_memory_and_queues_requests(server: Server) -> None:
    with Client(server.url) as client:
        released = client.release_memory(keep_weights="host")
        assert released.ranks[0].bytes.keys() == {"shadow", KV, WEIGHTS, "cuda_graph"}
    queued = Generation(server, tokens=5)
    until("it waits", lambda: status(server)["waiting"] == 1)
    refuse(server.post("/continue_generation", {}), "are released", "resume", status_code=409)
    with Client(server.url) as client:
        assert client.status().memory.weights == "away"
        assert client.resume_memory().paused is False
    assert versions_of(expect_whole(queued)) == ["v0"]


def test_discarded_weights_are_not_served_before_an_update(server: Server, versions: Path) -> None:
    release(server, WEIGHTS, keep_weights="discard")
    assert memory(server)[WEIGHTS] == "lost"
    moved = resume_memory(server, WEIGHTS)
    assert "no copy" in moved["hollow"]
    assert memory(server)[WEIGHTS] == "hollow"
    assert server.get("/ready")["status_code"] == 503
    assert server.get("/health_generate")["status_code"] == 200
    answer = server.post("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}})
    assert answer["status_code"] == 503
    assert "hollow" in message_of(answer)
    # released once more while hollow
    release(server, WEIGHTS, keep_weights="host")
    assert resume_memory(server, WEIGHTS)["hollow"] is not None
    # a failing update repairs nothing
    weights = memory_release.MODEL.tensors(1)
    ranks = len(status(server)["ranks"])
    name = "model.norm.weight"
    bad = {**weights, name: weights[name] * float("nan")}
    body = {"weight_version": "v1", "non_blocking": True, "partial": False}
    answer = server.post("/update_weights_from_tensor", tensor_body(bad, ranks=ranks, **body))
    assert answer["status_code"] == 400, answer
    # partial updates repair the weights only with the last part
    names = sorted(weights)
    for part in (names[:5], names[5:-1], names[-1:]):
        assert memory(server)[WEIGHTS] == "hollow"
        piece = {name: weights[name] for name in part}
        sent = tensor_body(piece, ranks=ranks, **{**body, "partial": True})
        assert server.post("/update_weights_from_tensor", sent)["success"] is True
    assert memory(server)[WEIGHTS] == "present"
    assert server.get("/ready")["status_code"] == 200
    expect_served(server, 1)
    digests = [rank["digest"] for rank in status(server)["ranks"]]
    receipt = update(server, versions, 1, **LIVE)
    assert [rank["digest"] for rank in receipt["ranks"]] == digests
    assert status(server)["staging"]["can_roll_back"] is True


def test_failing_rank_keeps_memory_present_on_all_ranks(server: Server, faults: Faults) -> None:
    ranks = len(status(server)["ranks"])
    running = start_running(server, 2, tokens=LONG)
    served = serving(server)
    refuse(server.post("/release_memory_occupation", {}), "2 requests run", status_code=409)
    faults.inject("copy", "raise", rank=ranks - 1)
    pause(server, "retract")
    answer = server.post("/release_memory_occupation", {"keep_weights": "host"})
    refuse(answer, "injected fault")
    assert set(memory(server).values()) == {"present"}
    assert [holder["pause_id"] != "memory" for holder in status(server)["holders"]] == [True]
    assert serving(server) == served
    # a later failure: the other ranks resume the released memory
    faults.inject("saver", "raise", rank=ranks - 1)
    answer = server.post(
        "/release_memory_occupation", {"tags": [KV, WEIGHTS], "keep_weights": "host"}
    )
    assert answer["status_code"] == 500, answer
    assert "resumed all of it except the shadow" in answer["message"]
    assert set(memory(server).values()) == {"present"}
    resume(server)
    assert serving(server) == served
    expect_all_go_on(running)


def test_dead_trainer_loses_its_session_and_pause_while_memory_stays_released(
    server: Server, versions: Path
) -> None:
    """The leases of both end."""
    (frozen,) = start_running(server, 1, tokens=LASTING)
    pause(server, "retract", lease_s=5)
    release(server, KV, WEIGHTS, keep_weights="discard")
    resume_memory(server, WEIGHTS)
    session = {"non_blocking": True, "partial": False, "lease_s": 0.5}
    assert server.post("/begin_weight_update", session)["success"] is True
    until("its leases are over", lambda: status(server)["staging"]["state"] == "empty")
    until("its pause is over", lambda: len(status(server)["holders"]) == 1)
    assert memory(server) == {"kv_cache": "away", "weights": "hollow", "cuda_graph": "present"}
    settle(server, [frozen])
    # the next trainer finds the memory unchanged
    update(server, versions, 2, **LIVE)
    assert resume_memory(server, KV)["paused"] is False
    assert versions_of(expect_whole(frozen)) == ["v0", "v2"]


@pytest.mark.parametrize("level", [1, 2])
def test_vllm_sleep_keeps_requests_until_wake_up(
    server: Server, versions: Path, level: int
) -> None:
    frozen = start_running(server, 2, tokens=LONG)
    slept = server.post(f"/sleep?level={level}&mode=keep")
    assert (slept["status_code"], slept["status"], slept["level"]) == (200, "sleeping", level)
    assert memory(server)[KV] == "away"
    assert memory(server)[WEIGHTS] == ("away" if level == 1 else "lost")
    assert server.get("/is_sleeping")["is_sleeping"] is True
    settle(server, frozen)
    # a second sleep changes nothing, whatever its mode
    assert server.post("/sleep?level=1&mode=abort")["status"] == "sleeping"
    if level == 1:
        assert server.post("/wake_up")["status"] == "awake"
    else:
        assert server.post("/wake_up?tags=weights")["status"] == "sleeping"
        update(server, versions, 1, **LIVE)
        assert server.post("/wake_up?tags=kv_cache")["status"] == "awake"
    assert server.get("/is_sleeping")["is_sleeping"] is False
    for output in expect_all_go_on(frozen):
        assert versions_of(output) == (["v0"] if level == 1 else ["v0", "v1"])


def test_vllm_wake_up_before_the_weights_keeps_requests_waiting(
    server: Server, versions: Path
) -> None:
    """The update resumes them by itself."""
    (frozen,) = start_running(server, 1, tokens=LASTING)
    assert server.post("/sleep?level=2&mode=keep")["status_code"] == 200
    woken = server.post("/wake_up")
    assert (woken["status"], woken["paused"]) == ("awake", True)
    settle(server, [frozen])
    refused = server.post("/resume")
    assert refused["status_code"] == 409
    assert "Send all weights by updates to continue" in refused["message"]
    assert "resume_memory_occupation" not in refused["message"]
    update(server, versions, 1, **LIVE)
    assert versions_of(expect_whole(frozen)) == ["v0", "v1"]
    until("it is ready", lambda: server.get("/ready")["status_code"] == 200)


def test_server_started_without_weights_waits_for_an_update(
    pool: ServerPool, versions: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pool.discard()
    log = tmp_path_factory.mktemp("logs") / "empty.log"
    env = {"SGLANG_INFLIGHT_REQUIRE_UPDATE": "1"}
    flags = (
        "--load-format", "dummy",
        "--enable-memory-saver",
        "--enable-weights-cpu-backup",
    )  # fmt: skip
    with serve(versions / "v0", *flags, log=log, env=env) as server:
        assert server.get("/health_generate")["status_code"] == 200
        assert server.get("/ready")["status_code"] == 503
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
        answer = server.post("/generate", body)
        assert answer["status_code"] == 503
        assert "REQUIRE_UPDATE" in message_of(answer)
        # a request waiting for its grammar is refused just as early
        body["sampling_params"] = {"max_new_tokens": 2, "regex": "(t1 )*"}
        answer = server.post("/generate", body)
        assert answer["status_code"] == 503
        assert "REQUIRE_UPDATE" in message_of(answer)
        assert memory(server)[WEIGHTS] == "hollow"
        assert status(server)["digest"] is None
        update(server, versions, 1, **LIVE)
        assert server.get("/ready")["status_code"] == 200
        expect_served(server, 1)
        # --enable-weights-cpu-backup makes keeping a copy the default
        served = serving(server)
        release(server, KV, WEIGHTS)
        assert resume_memory(server, WEIGHTS, KV)["hollow"] is None
        assert serving(server) == served
        expect_served(server, 1)
        # at SIGTERM the server resumes its memory, so that queued requests can end
        release(server, KV, WEIGHTS, keep_weights="host")
        queued = Generation(server, tokens=3)
        until("it waits", lambda: status(server)["waiting"] == 1)
        os.kill(server.process.pid, signal.SIGTERM)
        assert versions_of(expect_whole(queued)) == ["v1"]
        until("it has gone", lambda: not server.is_alive())


def test_colocated_trainer_and_server_take_turns_with_memory(
    pool: ServerPool, tmp_path: Path
) -> None:
    """Five rounds of a trainer using the server's memory and giving it back.

    Memory is summed over the server's rank and the trainer. An idle process with the same imports
    counts as zero (``Resident``). The sum at any time is hardly more than the larger part: the rank
    before the trainer came, or the trainer while training.
    """
    pool.discard()
    versions = [f"v{version}" for version in range(1 + len(ROUNDS))]
    flags = (
        "--enable-memory-saver",
        "--max-total-tokens", "4096",
        # the temporary memory of a longer prefill would exceed the released memory
        "--chunked-prefill-size", "128",
        "--weight-version", "v0",
    )  # fmt: skip
    env = {"SGLANG_INFLIGHT_PACE_BYTES_PER_S": "0"}
    MODEL.build(tmp_path / "v0", 0)
    with (
        serve(tmp_path / "v0", *flags, log=tmp_path / "server.log", env=env) as server,
        colocated_trainer(server, tmp_path) as trainer,
        Resident(trainer.idle_bytes) as memory,
    ):
        [rank] = schedulers(server.process.pid)
        memory.watch("rank", rank.pid)
        streams = start_running(server, 4, tokens=500)
        fill(server)
        rank_alone = memory.peak("rank")
        memory.watch("trainer", trainer.pid)
        for version in versions[1:]:
            assert trainer.do_a_round() == version
            more_tokens(streams)
            fill(server)
        for output in expect_all_go_on(streams):
            assert versions_of(output) == versions
    larger = max(rank_alone, memory.peak("trainer"))
    assert memory.together < 1.25 * larger
    # without a release, memory would reach the sum of both
    assert rank_alone + memory.peak("trainer") > 1.5 * larger


def fill(server: Server) -> None:
    """Leave KV of many short requests in the prefix cache."""
    body = {"input_ids": [prompt(128) for _ in range(20)], "sampling_params": {"max_new_tokens": 1}}
    ask(server, "POST", "/generate", body)
