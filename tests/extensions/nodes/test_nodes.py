"""Two nodes: ranks of both answer each call, and a silent node is reported."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from harness import marker
from harness.server import Server
from harness.starting import ROOT
from tests.support.load import (
    ENDLESS,
    Generation,
    pause,
    resume,
    settle,
    start_running,
    status,
    until,
    update,
    versions_of,
)
from tests.support.nodes import Nodes, nodes_environment, serve_nodes
from tests.support.pool import ServerPool
from tests.support.updates import (
    LIVE,
    Sender,
    expect_to_run_on,
    refuse,
    serving,
    succeed,
    tensor_body,
)

pytest_plugins = ["tests.support.fixtures"]

STREAMS = 3
FLAGS = ("--weight-version", "v0")
FIRST, SECOND = "rank dp0 pp0 tp0", "rank dp0 pp0 tp1"


@pytest.fixture(scope="module")
def pair(
    pool: ServerPool, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    pool.discard()  # one server at a time
    with serve_nodes(
        checkpoints / "v0",
        *FLAGS,
        folder=tmp_path_factory.mktemp("nodes"),
        env=nodes_environment(),
        second=("-m", "tests.support.nodes"),
    ) as nodes:
        yield nodes


@pytest.fixture
def first(pair: Nodes, checkpoints: Path) -> Iterator[Server]:
    """The first node's server, which serves v0."""
    yield (first := pair.first)
    pair.continue_second()
    until("all ranks answer", lambda: first.get("/inflight/status")["status_code"] == 200)
    first.post("/abort_weight_update", {})
    resume(first)
    first.post("/abort_request", {"abort_all": True})
    update(first, checkpoints, 0, non_blocking=True, kv_cache="recompute")


@pytest.fixture
def streams(first: Server) -> list[Generation]:
    return start_running(first, STREAMS, tokens=ENDLESS)


def expect_epochs_alike(first: Server, version: int) -> None:
    ranks = status(first)["ranks"]
    assert [rank["tp_rank"] for rank in ranks] == [0, 1]
    assert {rank["weight_version"] for rank in ranks} == {f"v{version}"}
    assert len({rank["epoch"] for rank in ranks}) == 1


@pytest.mark.parametrize("source", ["disk", "tensor", "tensor_bucket", "distributed"])
def test_update_reaches_running_requests_on_both_nodes(
    first: Server, sender: Sender, streams: list[Generation], source: str
) -> None:
    receipt = succeed(sender.send(first, source, 1, ranks=2, weight_version="v1", **LIVE))
    assert [(rank["tp_rank"], rank["success"]) for rank in receipt["ranks"]] == [
        (0, True),
        (1, True),
    ]
    expect_epochs_alike(first, 1)
    expect_to_run_on(first, streams, [0, 1])


def test_update_is_refused_when_one_node_lacks_the_checkpoint(
    first: Server, checkpoints: Path, streams: list[Generation]
) -> None:
    before = serving(first)
    only_here = os.path.relpath(checkpoints / "v1", ROOT)
    failed = first.post("/update_weights_from_disk", {"model_path": only_here, **LIVE})
    refuse(failed, SECOND)
    assert FIRST not in failed["message"]
    assert serving(first) == before
    expect_to_run_on(first, streams, [0])


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort", "wait"])
def test_pause_is_acknowledged_by_both_nodes(first: Server, mode: str) -> None:
    tokens = 30 if mode == "wait" else ENDLESS
    streams = start_running(first, STREAMS, tokens=tokens)
    answer = pause(first, mode)
    settle(first, streams)
    counted = {"in_place": "running", "retract": "retracted", "abort": "aborted"}.get(mode)
    if counted is not None:
        assert [rank[counted] for rank in answer["ranks"]] == [STREAMS, STREAMS]
    else:
        assert [rank["running"] for rank in answer["ranks"]] == [0, 0]
    assert [rank["state"] for rank in status(first)["ranks"]] == ["frozen", "frozen"]
    resume(first)
    if counted in ("running", "retracted"):
        expect_to_run_on(first, streams, [0])


def test_lease_ends_on_both_nodes(first: Server, streams: list[Generation]) -> None:
    pause(first, "in_place", lease_s=0.3)
    until("the lease runs out", lambda: not status(first)["paused"])
    assert [rank["state"] for rank in status(first)["ranks"]] == ["running", "running"]
    expect_to_run_on(first, streams, [0])


def test_paused_update_rollback_and_blocking_update_reach_both_nodes(
    first: Server, checkpoints: Path, streams: list[Generation]
) -> None:
    pause(first, "in_place")
    # SGLang's own form, applied at once in a pause
    update(first, checkpoints, 1, flush_cache=False)
    resume(first)
    until("v1 is heard", lambda: all(s.tokens[-1] == marker.token(1) for s in streams))
    succeed(first.post("/inflight/rollback", {}))
    expect_to_run_on(first, streams, [0, 1, 0])
    # without a pause, SGLang's form waits for running requests
    (running,) = start_running(first, 1, tokens=40)
    update(first, checkpoints, 2)
    assert versions_of(running.output()) == ["v0"]
    expect_epochs_alike(first, 2)


def test_engine_on_the_second_node_names_the_first(pair: Nodes) -> None:
    file = pair.second_log.parent / "said.json"
    until("the engine has said it", file.is_file)
    said = json.loads(file.read_text())
    assert len(said) == 4
    for error, sentence in said.values():
        assert (error, "node_rank=0" in sentence) == ("NotOffered", True)


def test_foreign_messages_at_the_nodes_port_change_nothing(
    first: Server, checkpoints: Path
) -> None:
    before = serving(first)
    found = re.search(r"other nodes answer at tcp://([\d.]+):(\d+)", first.log_text())
    assert found is not None
    host, port = found[1], int(found[2])
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.linger = 1000
        stranger.connect(f"tcp://{host}:{port}")
        for frames in ([b""], [b"x" * 32, b"\x90"], [b"x" * 32, b"\x90", b"\x90"]):
            stranger.send_multipart(frames)
    with socket.create_connection((host, port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(4096))
    until("it is told", lambda: "connections ended at the port" in first.log_text())
    assert serving(first) == before
    update(first, checkpoints, 1, **LIVE)
    expect_epochs_alike(first, 1)


# ---- a node that stops answering and later continues -----------------------------------------


def test_node_silent_before_the_commit_drops_the_update(
    pair: Nodes, first: Server, checkpoints: Path, streams: list[Generation]
) -> None:
    before = serving(first)
    pair.stop_second()
    v1 = {"model_path": str(checkpoints / "v1"), "weight_version": "v1", **LIVE}
    refuse(first.post("/update_weights_from_disk", v1), SECOND, status_code=504)
    # both the caller and the log are told
    asked = refuse(first.get("/inflight/status"), SECOND, status_code=504)
    assert (asked["error"]["type"], FIRST in asked["message"]) == ("RankSilent", False)
    assert f"Nothing was heard of {SECOND}" in first.log_text()
    pair.continue_second()
    until("it is heard", lambda: first.get("/inflight/status")["status_code"] == 200)
    assert serving(first) == before
    succeed(first.post("/update_weights_from_disk", v1))
    expect_to_run_on(first, streams, [0, 1])


@pytest.mark.parametrize(
    ("path", "body"), [("/flush_cache", {}), ("/update_weight_version", {"new_version": "v0"})]
)
def test_sglangs_own_calls_do_not_wait_for_a_silent_node(
    pair: Nodes, first: Server, path: str, body: dict[str, Any]
) -> None:
    pair.stop_second()
    # the first call discovers the silence, the second comes afterwards
    for _ in range(2):
        unknown = first.post(path, body)
        assert (unknown["status_code"], SECOND in str(unknown)) == (504, True), unknown
    pair.continue_second()
    until("it is heard", lambda: first.get("/inflight/status")["status_code"] == 200)
    assert first.post(path, body)["status_code"] == 200
    expect_epochs_alike(first, 0)


def test_node_silent_after_the_vote_commits_once_it_continues(
    pair: Nodes, first: Server, streams: list[Generation]
) -> None:
    begun = succeed(first.post("/begin_weight_update", {"non_blocking": True}))
    session = {"session_id": begun["session_id"]}
    body = tensor_body(marker.tensors(1), ranks=2, weight_version="v1", **session)
    succeed(first.post("/update_weights_from_tensor", body))
    succeed(first.post("/seal_weight_update", session))
    pair.stop_second()
    unknown = first.post("/end_weight_update", {**session, **{"non_blocking": True}})
    assert (unknown["status_code"], unknown["error"]["type"]) == (504, "OutcomeUnknown")
    assert SECOND in unknown["message"]
    pair.continue_second()
    # both ranks commit when they reach the message
    until("v1 is heard", lambda: all(s.tokens[-1] == marker.token(1) for s in streams))
    expect_epochs_alike(first, 1)
    expect_to_run_on(first, streams, [0, 1])


def test_node_silent_in_a_pause_resumes_once_it_continues(
    pair: Nodes, first: Server, streams: list[Generation]
) -> None:
    pause(first, "in_place")
    settle(first, streams)
    pair.stop_second()
    unknown = first.post("/continue_generation", {})
    assert (unknown["status_code"], unknown["error"]["type"]) == (504, "OutcomeUnknown")
    pair.continue_second()
    expect_to_run_on(first, streams, [0])
