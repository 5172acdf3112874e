"""A server that is told to go: everybody has an answer first, and then it is gone."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from harness import marker
from harness.server import Server, serve
from tests.support.load import (
    ENDLESS,
    PATIENCE_S,
    Generation,
    expect_whole,
    pass_boundaries,
    pause,
    settle,
    start_running,
    status,
    until,
)
from tests.support.pool import ServerPool
from tests.support.updates import Call, empty_rendezvous, staging, succeed, tensor_body

TOKENS = 600


@pytest.fixture
def leaving(pool: ServerPool, checkpoints: Path, tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own."""
    pool.discard()
    flags = ("--weight-version", "v0")
    with serve(checkpoints / "v0", *flags, log=tmp_path / "server.log") as server:
        yield server


def tell_to_go(server: Server) -> None:
    os.kill(server.process.pid, signal.SIGTERM)


def expect_gone(server: Server) -> None:
    until("it has gone", lambda: not server.is_alive())


def test_pauses_end(leaving: Server) -> None:
    """SGLang lets requests end first."""
    # it ends when this test says so, and the server is there until then
    (long,) = start_running(leaving, 1, tokens=ENDLESS)
    (short,) = start_running(leaving, 1, tokens=TOKENS)
    pause(leaving, "in_place")
    (seen, _) = settle(leaving, [long, short])
    tell_to_go(leaving)
    until("the pause has ended", lambda: long.count > seen)
    assert leaving.post("/pause_generation", {"mode": "in_place"})["status_code"] == 409
    expect_whole(short)
    long.abort()
    expect_gone(leaving)


def test_calls_that_wait_are_answered(leaving: Server) -> None:
    """For a trainer that never comes, and for a turn that never comes."""
    joining = Call(leaving, "/init_weights_update_group", empty_rendezvous())
    until("the ranks wait for the trainer", lambda: staging(leaving)[0]["groups"])
    succeed(leaving.post("/begin_weight_update", {"non_blocking": True}))
    body = {"model_path": "/nowhere", "non_blocking": True, "flush_cache": False}
    queued = Call(leaving, "/update_weights_from_disk", body)
    tell_to_go(leaving)
    for call in (joining, queued):
        answer = call.answer()
        assert answer["status_code"] == 504, answer
        assert "the server was shut down" in answer["message"]
    expect_gone(leaving)


def test_a_request_that_comes_when_the_ranks_have_ended(leaving: Server) -> None:
    """It has begun to come in before, so that the server waits for it."""
    Generation(leaving, tokens=1).output()
    url = urlsplit(leaving.url)
    body = json.dumps({"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: {url.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    assert url.hostname is not None
    assert url.port is not None
    with socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode() + body[:5])
        # it has read so far when it has answered another
        pass_boundaries(leaving, 1)
        tell_to_go(leaving)
        until("it waits", lambda: "Waiting for connections" in leaving.log_text())
        connection.sendall(body[5:])
        response = HTTPResponse(connection)
        response.begin()
        assert response.status == 503
        assert b"shut down" in response.read()
    expect_gone(leaving)


def test_a_session_that_holds_requests(pool: ServerPool, checkpoints: Path, tmp_path: Path) -> None:
    """Its trainer has gone, and what it wrote in place is a mixture: requests are told so."""
    pool.discard()
    env = {"SGLANG_INFLIGHT_STAGING": "off"}
    with serve(checkpoints / "v0", log=tmp_path / "server.log", env=env) as leaving:
        sampling = {"max_new_tokens": ENDLESS, "ignore_eos": True}
        held = Call(leaving, "/generate", {"input_ids": [5], "sampling_params": sampling})
        until("it runs", lambda: status(leaving)["running"] == 1)
        succeed(leaving.post("/begin_weight_update", {}))
        head = {"lm_head.weight": marker.tensors(1)["lm_head.weight"]}
        succeed(leaving.post("/update_weights_from_tensor", tensor_body(head)))
        assert staging(leaving)[0]["dirty"]
        tell_to_go(leaving)
        assert held.answer()["status_code"] == 503
        expect_gone(leaving)
