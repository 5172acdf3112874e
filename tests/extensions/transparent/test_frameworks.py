"""Frameworks' updates in transparent mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import marker
from harness.server import Server
from harness.trainer import Trainers
from tests.support.frameworks import FRAMEWORKS, Client, Framework
from tests.support.load import (
    ENDLESS,
    more_tokens,
    pause,
    resume,
    settle,
    start_running,
    status,
    until,
)
from tests.support.updates import (
    expect_served,
    refuse,
    serving,
    staging,
    tensor_body,
)
from tests.test_frameworks import expect_whole_update
from tests.test_frameworks import framework as framework

pytest_plugins = ["tests.support.fixtures"]


def test_framework_update_goes_live_in_transparent_mode(
    transparent_server: Server, framework: Framework, checkpoints: Path, trainers: Trainers
) -> None:
    server = transparent_server
    client = Client(server, framework, checkpoints, trainers)
    with client.connected():
        running = start_running(server, 3, tokens=ENDLESS)
        answer = client.pause()
        assert (answer["paused"], answer["transparent"]) == (False, True)
        assert answer["mode"] == framework.mode
        assert server.get("/is_paused")["is_paused"] is True
        more_tokens(running)
        client.begin()
        client.send(1, "v1")
        # staged but not served
        more_tokens(running)
        expect_served(server, 0)
        assert not any(generation.has_ended for generation in running)
        answer = client.finish("v1")
        assert (answer["status_code"], answer["paused"]) == (200, False), answer
        assert answer["receipt"]["success"] is True
        retracts = framework.mode == "retract"
        expect_whole_update(server, framework, running, int(retracts))
    named = "v1" if framework.names else "v0"
    assert server.get("/get_weight_version")["weight_version"] == named
    assert server.get("/is_paused")["is_paused"] is False


@pytest.mark.parametrize("name", ["slime-tensor", "miles-tensor", "areal-distributed"])
def test_wrong_shape_refuses_all_further_pieces_and_the_end(
    transparent_server: Server, checkpoints: Path, trainers: Trainers, name: str
) -> None:
    """The server keeps the old weights."""
    server, framework = transparent_server, FRAMEWORKS[name]
    before = serving(server)
    client = Client(server, framework, checkpoints, trainers)
    running = start_running(server, 2, tokens=ENDLESS)
    with client.connected():
        client.pause()
        client.begin()
        wrong = {"model.norm.weight": marker.tensors(1)["model.norm.weight"][:-1]}
        body = tensor_body(wrong, flush_cache=False)
        refuse(server.post("/update_weights_from_tensor", body), "model.norm.weight")
        refuse(
            server.post("/update_weights_from_tensor", tensor_body(marker.tensors(1))),
            "nothing has changed",
        )
        answer = server.post("/continue_generation", {})
        refuse(answer, "nothing has changed", "model.norm.weight")
    more_tokens(running)
    assert serving(server) == before
    # the next update works as usual
    if framework.source != "distributed":
        client.pause()
        client.begin()
        client.send(1, "v1")
        assert client.finish("v1")["status_code"] == 200
        expect_served(server, 1)


def test_unreadable_body_drops_the_whole_update(transparent_server: Server) -> None:
    """The body's weights are missing, so the other pieces must not go live."""
    server = transparent_server
    before = serving(server)
    pause(server, "retract")
    good = tensor_body(marker.tensors(1), flush_cache=False)
    assert server.post("/update_weights_from_tensor", good)["status_code"] == 200
    refuse(server.post("/update_weights_from_tensor", {"flush_cache": "perhaps"}))
    refuse(server.post("/continue_generation", {}), "nothing has changed")
    assert serving(server) == before


def test_trainer_dying_between_pieces_drops_the_update(
    transparent_server: Server, checkpoints: Path, trainers: Trainers
) -> None:
    """The next trainer joins under the same name and updates."""
    server, framework = transparent_server, FRAMEWORKS["slime-distributed"]
    before = serving(server)
    running = start_running(server, 2, tokens=ENDLESS)
    client = Client(server, framework, checkpoints, trainers)
    with client.connected():
        client.pause()
        first, second = client.bodies(1)
        trainers.get().send(1, count=len(first["names"]), group=framework.group)
        assert client.piece(first, "v1")()["success"] is True
        trainers.get().close()
        assert client.piece(second, "v1")()["success"] is False
    refuse(server.post("/continue_generation", {}), "nothing has changed")
    more_tokens(running)
    assert serving(server) == before
    with client.connected():
        client.pause()
        client.send(1, "v1")
        assert client.finish("v1")["status_code"] == 200
    expect_served(server, 1)


def test_second_pause_drops_the_pieces_of_a_dead_trainer(transparent_server: Server) -> None:
    server = transparent_server
    name = "model.norm.weight"
    pause(server, "retract")
    stale = tensor_body({name: marker.tensors(2)[name]}, flush_cache=False)
    assert server.post("/update_weights_from_tensor", stale)["status_code"] == 200
    assert pause(server, "retract")["transparent"] is True
    assert [rank["state"] for rank in staging(server)] == ["empty"]
    assert resume(server)["receipt"] is None


def test_transparent_pause_without_an_update_becomes_real(transparent_server: Server) -> None:
    running = start_running(transparent_server, 2, tokens=ENDLESS)
    pause(transparent_server, "in_place")
    more_tokens(running)
    until("the pause is real", lambda: status(transparent_server)["state"] == "frozen")
    settle(transparent_server, running)
    assert resume(transparent_server)["paused"] is False
    more_tokens(running)


def test_memory_release_makes_the_transparent_pause_real(
    transparent_server: Server, checkpoints: Path
) -> None:
    """Weights sent in that pause go live at its end."""
    server = transparent_server
    running = start_running(server, 2, tokens=ENDLESS)
    pause(server, "retract")
    released = server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    assert released["status_code"] == 200, released
    assert status(server)["state"] == "frozen"
    body = {"model_path": str(checkpoints / "v1"), "weight_version": "v1"}
    assert server.post("/update_weights_from_disk", body)["success"] is True
    assert status(server)["weight_version"] == "v0"
    answer: dict[str, Any] = resume(server)
    assert answer["receipt"]["weight_version"] == "v1"
    assert answer["paused"] is True
    assert server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})["paused"] is False
    new = marker.token(1)
    for generation in running:
        until("new tokens", lambda g=generation: g.tokens[-2:] == [new] * 2)  # type: ignore[misc]


def test_version_name_alone_relabels_no_earlier_token(transparent_server: Server) -> None:
    server = transparent_server
    (running,) = start_running(server, 1, tokens=ENDLESS)
    pause(server, "in_place")
    body = {"new_version": "other"}
    assert server.post("/update_weight_version", body)["status_code"] == 200
    assert server.get("/get_weight_version")["weight_version"] == "v0"
    more_tokens([running])
    resume(server)
    assert server.get("/get_weight_version")["weight_version"] == "other"
    more_tokens([running])
    running.abort()
    versions = [span["version"] for span in running.output().meta["weight_versions"]]
    assert versions == ["v0", "other"]


def test_transparent_mode_leaves_pauses_with_a_lease_or_an_id_real(
    transparent_server: Server,
) -> None:
    running = start_running(transparent_server, 2, tokens=ENDLESS)
    taken = pause(transparent_server, "in_place", lease_s=60)
    assert taken["paused"] is True
    settle(transparent_server, running)
    resume(transparent_server, pause_id=taken["pause_id"])
    more_tokens(running)
