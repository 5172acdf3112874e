"""SGLang's ``/weights_checker`` may overwrite weights with noise, which must not be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import marker
from harness.server import Server
from tests.support.load import (
    ENDLESS,
    Generation,
    ask,
    expect_all_go_on,
    expect_whole,
    pause,
    resume,
    start_running,
    status,
    update,
    versions_of,
)
from tests.support.updates import (
    LIVE,
    drop_session,
    expect_served,
    refuse,
    serving,
    staging,
    succeed,
    tensor_body,
    until_staging,
)

pytest_plugins = ["tests.support.fixtures"]


def check(server: Server, action: str, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.post("/weights_checker", {"action": action, **fields})
    return answer


def checksums(server: Server) -> list[dict[str, str]]:
    """Return the checksums of all parameters and buffers, by rank."""
    return [rank["checksums"] for rank in succeed(check(server, "checksum"))["ranks"]]


def expect_hollow(server: Server) -> None:
    for rank in status(server)["ranks"]:
        assert "reset_tensors" in rank["memory"]["hollow"]
        assert rank["digest"] is None
        assert rank["previous_version"] is None
        assert rank["staging"]["can_roll_back"] is False


def expect_noise_is_not_served(server: Server, checkpoints: Path) -> None:
    """Check that noise is served by no call between a reset and a whole update."""
    update(server, checkpoints, 1, **LIVE)
    (digest,) = {rank["digest"] for rank in status(server)["ranks"][:1]}
    update(server, checkpoints, 0, **LIVE)
    was = checksums(server)
    succeed(check(server, "reset_tensors"))
    assert checksums(server) != was
    expect_hollow(server)
    answer = Generation(server, tokens=2, stream=False)
    answer.wait_for_end()
    with pytest.raises(AssertionError, match="hollow"):
        answer.output()
    refuse(server.post("/inflight/rollback", {}), "no previous version")
    receipt = update(server, checkpoints, 1, **LIVE)
    assert receipt["ranks"][0]["digest"] == digest
    expect_served(server, 1)
    refuse(server.post("/inflight/rollback", {}), "no previous version")
    assert status(server)["memory"]["hollow"] is None
    update(server, checkpoints, 0, **LIVE)
    # buffers outside the checkpoint are restored too
    assert checksums(server) == was
    expect_served(server, 0)


def test_noise_is_not_served(server: Server, checkpoints: Path) -> None:
    expect_noise_is_not_served(server, checkpoints)


def test_noise_of_two_ranks_is_not_served(tp2_server: Server, checkpoints: Path) -> None:
    expect_noise_is_not_served(tp2_server, checkpoints)


def test_noise_in_place_is_not_served(off_server: Server, checkpoints: Path) -> None:
    expect_noise_is_not_served(off_server, checkpoints)


def test_several_partial_updates_replace_noise(server: Server, checkpoints: Path) -> None:
    """Self-checking trainers reset, send in their usual pieces, and compare."""
    was = checksums(server)
    succeed(check(server, "reset_tensors"))
    weights = marker.tensors(0)
    head = {"lm_head.weight": weights.pop("lm_head.weight")}
    succeed(server.post("/update_weights_from_tensor", tensor_body(weights)))
    assert status(server)["memory"]["hollow"] is not None
    succeed(server.post("/update_weights_from_tensor", tensor_body(head)))
    assert status(server)["memory"]["hollow"] is None
    assert checksums(server) == was
    expect_served(server, 0)


def test_reset_is_refused_while_requests_run(server: Server) -> None:
    running = start_running(server, 2, tokens=ENDLESS)
    before = serving(server)
    refuse(check(server, "reset_tensors"), "2 requests run", status_code=409)
    refuse(check(server, "guess"), "checksum, compare, snapshot, reset_tensors")
    assert serving(server) == before
    expect_all_go_on(running)


def test_paused_requests_survive_a_reset(server: Server, checkpoints: Path) -> None:
    (frozen,) = start_running(server, 1, tokens=40)
    pause(server, "retract")
    succeed(check(server, "reset_tensors"))
    assert server.get("/ready")["status_code"] == 503
    update(server, checkpoints, 1, **LIVE)
    resume(server)
    assert versions_of(expect_whole(frozen)) == ["v0", "v1"]


def test_reset_is_refused_while_a_session_is_open(server: Server) -> None:
    before = serving(server)
    ask(server, "POST", "/begin_weight_update", {"non_blocking": True})
    until_staging(server)
    refuse(check(server, "reset_tensors"), "a weight update is open", status_code=409)
    drop_session(server)
    assert serving(server) == before
    assert all(rank["dirty"] is None for rank in staging(server))
    expect_served(server, 0)
