"""Sessions that must bring all of the weights, for clients that end every session.

NeMo-RL ends its session in ``finally``, also after a failed transfer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import marker
from harness.server import Server
from harness.trainer import Trainers
from tests.support.frameworks import FRAMEWORKS, Client
from tests.support.load import ENDLESS, more_tokens, start_running, status
from tests.support.pool import FLAVOURS, ServerPool
from tests.support.sparse import changes_between
from tests.support.updates import (
    drop_session,
    expect_served,
    expect_to_run_on,
    refuse,
    serving,
    staging,
    succeed,
    tensor_body,
)

pytest_plugins = ["tests.support.fixtures"]

BEGIN, END, TENSOR = "/begin_weight_update", "/end_weight_update", "/update_weights_from_tensor"
NORM, HEAD = "model.norm.weight", "lm_head.weight"


@pytest.fixture(params=["whole_server", "as_before_server"])
def server(request: pytest.FixtureRequest, pool: ServerPool) -> Iterator[Server]:
    yield from serve(pool, request.param)


@pytest.fixture
def whole_server(pool: ServerPool) -> Iterator[Server]:
    yield from serve(pool, "whole_server")


@pytest.fixture
def as_before_server(pool: ServerPool) -> Iterator[Server]:
    yield from serve(pool, "as_before_server")


def serve(pool: ServerPool, flavour: str) -> Iterator[Server]:
    server = pool.get(FLAVOURS[flavour])
    yield server
    # a test may have failed amid a pause, or may have ended the server
    with contextlib.suppress(httpx.HTTPError):
        server.post("/continue_generation", {})
    drop_session(server)
    pool.restore()


@pytest.fixture
def nemo(server: Server, checkpoints: Path, trainers: Trainers) -> Client:
    return nemo_of(server, checkpoints, trainers)


def nemo_of(server: Server, checkpoints: Path, trainers: Trainers) -> Client:
    return Client(server, FRAMEWORKS["nemo-tensor"], checkpoints, trainers)


def sync(client: Client, version: int) -> None:
    """Make a whole step of NeMo-RL's."""
    client.pause()
    client.begin()
    client.send(version, f"v{version}")
    assert client.finish(f"v{version}")["status_code"] == 200


def send_half(client: Client, version: int) -> list[str]:
    """Pause, begin, and send the first of two buckets. Return the names of the second."""
    client.pause()
    client.begin()
    succeed(client.piece(client.bodies(version)[0], f"v{version}")())
    names = list(marker.tensors(version))
    return sorted(names[-(-len(names) // 2) :])


def session(server: Server, weights: dict[str, Any], version: str, **begin: Any) -> dict[str, Any]:
    """Make a session of SGLang's own kind, and return the answer of its end."""
    succeed(server.post(BEGIN, begin))
    succeed(server.post(TENSOR, tensor_body(weights, weight_version=version)))
    answer: dict[str, Any] = server.post(END, {})
    return answer


def test_failed_transfer_of_nemo_changes_nothing(server: Server, nemo: Client) -> None:
    sync(nemo, 1)
    before = serving(server)
    running = start_running(server, 3, tokens=ENDLESS)
    missing = send_half(nemo, 2)
    refuse(server.post(END, {}), "not complete", ", ".join(missing))
    assert nemo.resume()["status_code"] == 200
    more_tokens(running)
    assert serving(server) == before
    sync(nemo, 3)
    expect_to_run_on(server, running, [1, 3])


def test_transfer_that_fails_before_its_first_bucket_is_no_version(
    server: Server, nemo: Client
) -> None:
    before = serving(server)
    nemo.pause()
    nemo.begin()
    refuse(server.post(END, {}), "no tensor")
    assert nemo.resume()["status_code"] == 200
    assert serving(server) == before


def test_refused_bucket_refuses_the_end_and_the_next_sync_commits(
    server: Server, nemo: Client
) -> None:
    before = serving(server)
    send_half(nemo, 2)
    wrong = {NORM: marker.tensors(2)[NORM][:-1]}
    refuse(server.post(TENSOR, tensor_body(wrong)), NORM)
    refuse(server.post(END, {}), NORM)
    assert nemo.resume()["status_code"] == 200
    assert serving(server) == before
    sync(nemo, 3)
    expect_served(server, 3)


def test_single_calls_are_updates_of_their_own(server: Server) -> None:
    """slime sends many calls without a session."""
    weights = marker.tensors(1)
    for name in (NORM, HEAD):
        body = tensor_body({name: weights[name]}, weight_version=name, non_blocking=True)
        assert succeed(server.post(TENSOR, body))["weight_version"] == name


@pytest.mark.parametrize("begin", [{"partial": True}, {"partial": True, "selector": "target"}])
def test_session_that_says_partial_may_bring_a_part(server: Server, begin: dict[str, Any]) -> None:
    part = {HEAD: marker.tensors(0)[HEAD]}
    succeed(session(server, part, "part", **begin))
    assert status(server)["weight_version"] == "part"


def test_session_of_sparse_tensors_has_to_say_partial(server: Server) -> None:
    before = serving(server)
    body = tensor_body(changes_between(0, 1), load_format="sparse")
    succeed(server.post(BEGIN, {"expected_version": "v0"}))
    succeed(server.post(TENSOR, body))
    refuse(server.post(END, {}), "sparse", "partial=true")
    assert serving(server) == before
    succeed(server.post(BEGIN, {"expected_version": "v0", "partial": True}))
    succeed(server.post(TENSOR, body))
    succeed(server.post(END, {}))
    expect_served(server, 1)


def test_session_of_a_draft_alone_is_refused(whole_server: Server) -> None:
    refuse(whole_server.post(BEGIN, {"selector": "draft"}), "SGLANG_INFLIGHT_SESSIONS", "draft")
    assert [rank["state"] for rank in staging(whole_server)] == ["empty"]


def test_later_sessions_need_the_names_of_the_last(pool: ServerPool) -> None:
    """Neither a rollback, a rename, a single call nor an explicit session changes them."""
    # no session was there before
    pool.discard()
    server, weights = pool.get(FLAVOURS["as_before_server"]), marker.tensors(1)
    both = {name: weights[name] for name in (NORM, HEAD)}
    succeed(session(server, {HEAD: weights[HEAD]}, "v1"))
    # more than before
    succeed(session(server, both, "v2"))

    def expect_both_needed() -> None:
        before = serving(server)
        refuse(session(server, {HEAD: weights[HEAD]}, "half"), "1 of the 2 tensors", NORM)
        assert serving(server) == before

    expect_both_needed()
    succeed(session(server, both, "v2"))
    succeed(server.post("/inflight/rollback", {}))
    expect_both_needed()
    named = server.post("/update_weight_version", {"new_version": "x", "abort_all_requests": False})
    assert named["status_code"] == 200, named
    expect_both_needed()
    succeed(session(server, {HEAD: weights[HEAD]}, "part", partial=True))
    expect_both_needed()
    succeed(server.post(TENSOR, tensor_body({HEAD: weights[HEAD]}, non_blocking=True)))
    expect_both_needed()
    succeed(session(server, both, "v3"))


def test_update_from_disk_leaves_the_names_of_the_last_session(
    as_before_server: Server, checkpoints: Path
) -> None:
    server, weights = as_before_server, marker.tensors(1)
    succeed(session(server, weights, "v1"))
    from_disk = {"model_path": str(checkpoints / "v2"), "non_blocking": True}
    succeed(server.post("/update_weights_from_disk", from_disk))
    half = session(server, {HEAD: weights[HEAD]}, "half")
    refuse(half, "not complete", f"{len(weights) - 1} of the {len(weights)}")
    expect_served(server, 2)
    succeed(session(server, weights, "v1"))
    expect_served(server, 1)


def test_failed_transfer_in_place_is_served_by_nobody(
    pool: ServerPool, checkpoints: Path, trainers: Trainers
) -> None:
    """The next sync repairs the weights."""
    for server in serve(pool, "whole_off_server"):
        client = nemo_of(server, checkpoints, trainers)
        missing = send_half(client, 2)
        refuse(server.post(END, {}), missing[0], "partially written")
        assert client.resume()["status_code"] == 200
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 3}}
        refuse(server.post("/generate", body), "partially written", status_code=503)
        sync(client, 3)
        expect_served(server, 3)
