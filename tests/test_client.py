"""The trainer's client and the command line, against a server under load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from sglang_inflight.cli import app
from sglang_inflight.client import Client
from sglang_inflight.errors import Conflict, Refused
from tests.support import marker
from tests.support.load import ENDLESS, expect_all_go_on, settle, start_running, status, until
from tests.support.server import Server, free_port
from tests.support.updates import drop_session, expect_to_run_on, says, serving, tensor_body

# a lease that runs out while a test waits for it
SHORT_S = 0.5


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client
    drop_session(server)


# ---- pauses ------------------------------------------------------------------------------


def test_paused_outlives_its_lease(server: Server, client: Client) -> None:
    """It is renewed while the block runs, and let go at its end."""
    generations = start_running(server, 2, tokens=ENDLESS)
    with client.paused("in_place", lease_s=SHORT_S) as answer:
        counts = settle(server, generations)
        renewals = _count_renewals(server, answer["pause_id"])
        next(renewals), next(renewals), next(renewals), next(renewals)
        assert settle(server, generations) == counts
    assert not client.status()["paused"]
    expect_all_go_on(generations)


def _count_renewals(server: Server, pause_id: str) -> Iterator[None]:
    """Once for each time the lease was seen to have grown."""
    left = _lease_left(server, pause_id)
    while True:
        before, left = left, _lease_left(server, pause_id)
        if left > before:
            yield


def _lease_left(server: Server, pause_id: str) -> float:
    (holder,) = status(server)["holders"]
    assert holder["pause_id"] == pause_id
    left: float = holder["lease_left_s"]
    return left


def test_paused_ends_when_the_block_fails(server: Server, client: Client) -> None:
    generations = start_running(server, 2, tokens=ENDLESS)
    with pytest.raises(ZeroDivisionError), client.paused():
        raise ZeroDivisionError
    assert not client.status()["paused"]
    expect_all_go_on(generations)


def test_pause_that_was_lost(server: Server, client: Client) -> None:
    """Somebody let go of everything: what was done in the block was not done in a pause."""
    with pytest.raises(Conflict, match="not held"), client.paused():
        client.resume()
    assert not client.status()["paused"]


def test_pause_of_a_client_that_dies(server: Server) -> None:
    generations = start_running(server, 2, tokens=ENDLESS)
    with Client(server.url) as client:
        client.pause("in_place", lease_s=SHORT_S)
    until("the lease has run out", lambda: not status(server)["paused"])
    expect_all_go_on(generations)


# ---- updates -----------------------------------------------------------------------------


def test_update_and_rollback(server: Server, client: Client, checkpoints: Path) -> None:
    generations = start_running(server, 2, tokens=ENDLESS)
    receipt = client.update_from_disk(str(checkpoints / "v1"), weight_version="v1")
    assert (receipt["base_version"], receipt["weight_version"]) == ("v0", "v1")
    for generation in generations:
        generation.wait_for_tokens(generation.count + 3)
    assert client.roll_back()["weight_version"] == "v0"
    expect_to_run_on(server, generations, [0, 1, 0])


def test_refusals(server: Server, client: Client, checkpoints: Path) -> None:
    before = serving(server)
    with pytest.raises(Conflict, match="v7"):
        client.update_from_disk(str(checkpoints / "v1"), expected_version="v7")
    with pytest.raises(Refused, match="not a directory"):
        client.update_from_disk("/no/such/folder")
    with pytest.raises(Refused, match="colour"):
        client.update_from_disk(str(checkpoints / "v1"), colour="red")
    assert serving(server) == before


def test_session(server: Server, client: Client) -> None:
    weights = marker.tensors(1)
    with client.session(weight_version="v1", partial=False) as receipt:
        server.post("/update_weights_from_tensor", tensor_body(weights))
        says(server, 0)
    assert receipt["tensors"] == len(weights)
    says(server, 1)


def test_session_that_fails_changes_nothing(server: Server, client: Client) -> None:
    before = serving(server)

    def send_and_fail() -> None:
        with client.session():
            server.post("/update_weights_from_tensor", tensor_body(marker.tensors(1)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        send_and_fail()
    assert serving(server) == before
    says(server, 0)


# ---- the command line --------------------------------------------------------------------


def _run(server: Server, *words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"SGLANG_URL": server.url})


def _json(server: Server, *words: str) -> Any:
    result = _run(server, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_commands(server: Server, checkpoints: Path) -> None:
    generations = start_running(server, 2, tokens=ENDLESS)
    pause_id = _run(server, "pause").stdout.strip()
    assert _json(server, "status")["holders"][0]["pause_id"] == pause_id
    assert pause_id in _run(server, "status").stdout.replace("\n", "")
    stale = _run(server, "continue", "nobody")
    assert (stale.exit_code, "nobody" in stale.stderr) == (3, True)
    assert _run(server, "continue", pause_id).exit_code == 0
    updated = _json(
        server, "update", "disk", str(checkpoints / "v1"), "--weight-version", "v1",
        "--expected-version", "v0",
    )  # fmt: skip
    assert updated["weight_version"] == "v1"
    for generation in generations:
        generation.wait_for_tokens(generation.count + 3)
    back = _run(server, "rollback")
    assert (back.exit_code, back.stdout.startswith("v1 → v0 on 1 ranks")) == (0, True)
    expect_to_run_on(server, generations, [0, 1, 0])


def test_command_that_is_refused(server: Server) -> None:
    before = serving(server)
    refused = _run(server, "update", "disk", "/no/such/folder")
    assert (refused.exit_code, "/no/such/folder" in refused.stderr) == (1, True)
    assert serving(server) == before


def test_server_that_is_not_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = CliRunner().invoke(app, ["status", "--url", url])
    assert (result.exit_code, url in result.stderr) == (5, True)
    with Client(url) as client, pytest.raises(httpx.ConnectError):
        client.status()
