"""Shutdown by SIGTERM: the server answers all callers, then exits."""

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
from harness.starting import STEP_MS
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

# few tokens outlast the calls of a test, as their steps wait so many milliseconds
TOKENS, SLOW_STEP_MS = 80, 30


@pytest.fixture
def own_server(pool: ServerPool, checkpoints: Path, tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own, to be shut down."""
    pool.discard()
    flags = ("--weight-version", "v0")
    env = {STEP_MS: str(SLOW_STEP_MS)}
    with serve(checkpoints / "v0", *flags, log=tmp_path / "server.log", env=env) as server:
        yield server


def send_sigterm(server: Server) -> None:
    os.kill(server.process.pid, signal.SIGTERM)


def expect_exit(server: Server) -> None:
    until("it has gone", lambda: not server.is_alive())


def test_sigterm_ends_pauses_so_that_requests_end(own_server: Server) -> None:
    """SGLang waits for running requests before it exits."""
    # keeps the server alive until the test aborts this request
    (long,) = start_running(own_server, 1, tokens=ENDLESS)
    (short,) = start_running(own_server, 1, tokens=TOKENS)
    pause(own_server, "in_place")
    (seen, _) = settle(own_server, [long, short])
    send_sigterm(own_server)
    until("the pause has ended", lambda: long.count > seen)
    assert own_server.post("/pause_generation", {"mode": "in_place"})["status_code"] == 409
    expect_whole(short)
    long.abort()
    expect_exit(own_server)


def test_sigterm_answers_waiting_calls(own_server: Server) -> None:
    """One call waits for a trainer, the other for its turn; neither ever comes."""
    joining = Call(own_server, "/init_weights_update_group", empty_rendezvous())
    until("the ranks wait for the trainer", lambda: staging(own_server)[0]["groups"])
    succeed(own_server.post("/begin_weight_update", {"non_blocking": True}))
    body = {"model_path": "/nowhere", "non_blocking": True, "flush_cache": False}
    queued = Call(own_server, "/update_weights_from_disk", body)
    send_sigterm(own_server)
    for call in (joining, queued):
        answer = call.answer()
        assert answer["status_code"] == 504, answer
        assert "the server was shut down" in answer["message"]
    expect_exit(own_server)


def test_request_after_the_ranks_exited_answers_503(own_server: Server) -> None:
    """The request's first bytes came before, so the server waits for the rest."""
    Generation(own_server, tokens=1).output()
    url = urlsplit(own_server.url)
    body = json.dumps({"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: {url.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    assert url.hostname is not None
    assert url.port is not None
    with socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode() + body[:5])
        # an answered call proves that the server has read these bytes
        pass_boundaries(own_server, 1)
        send_sigterm(own_server)
        until("it waits", lambda: "Waiting for connections" in own_server.log_text())
        connection.sendall(body[5:])
        response = HTTPResponse(connection)
        response.begin()
        assert response.status == 503
        assert b"shut down" in response.read()
    expect_exit(own_server)


def test_sigterm_answers_requests_held_by_an_abandoned_session(
    pool: ServerPool, checkpoints: Path, tmp_path: Path
) -> None:
    """The trainer is gone and the weights are partially written."""
    pool.discard()
    env = {"SGLANG_INFLIGHT_STAGING": "off"}
    with serve(checkpoints / "v0", log=tmp_path / "server.log", env=env) as own_server:
        sampling = {"max_new_tokens": ENDLESS, "ignore_eos": True}
        held = Call(own_server, "/generate", {"input_ids": [5], "sampling_params": sampling})
        until("it runs", lambda: status(own_server)["running"] == 1)
        succeed(own_server.post("/begin_weight_update", {}))
        head = {"lm_head.weight": marker.tensors(1)["lm_head.weight"]}
        succeed(own_server.post("/update_weights_from_tensor", tensor_body(head)))
        assert staging(own_server)[0]["dirty"]
        send_sigterm(own_server)
        assert held.answer()["status_code"] == 503
        expect_exit(own_server)


def test_sigterm_ends_waits_for_a_version(own_server: Server) -> None:
    (running,) = start_running(own_server, 1, tokens=ENDLESS)
    held = Generation(own_server, tokens=2, exact_weight_version="v1")
    wait = Call.of(lambda: own_server.get("/inflight/wait?epoch=1"))
    # the server answers a later request, so it has taken these in
    assert Generation(own_server, tokens=2, stream=False).output().tokens
    send_sigterm(own_server)
    held.wait_for_end()
    assert (held.status, held.count) == (503, 0)
    assert "SIGTERM" in (held.refusal or "")
    assert wait.answer()["status_code"] == 503
    running.abort()
    expect_exit(own_server)
