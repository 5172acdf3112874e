"""Updates without shadow weights, written in place at a step boundary."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import marker
from harness.server import Server
from tests.support.faults import Faults
from tests.support.load import (
    ENDLESS,
    ask,
    expect_all_go_on,
    expect_whole,
    more_tokens,
    start,
    start_running,
    status,
    until,
    versions_of,
)
from tests.support.pool import outlast_watchdog
from tests.support.updates import misshapen, refuse, succeed, tensor_body

pytest_plugins = ["tests.support.fixtures"]


def update(server: Server, path: Path, version: str, **fields: Any) -> Any:
    body = {
        "model_path": str(path),
        "weight_version": version,
        "non_blocking": True,
        "flush_cache": False,
        **fields,
    }
    return server.post("/update_weights_from_disk", body)


def staging(server: Server) -> dict[str, Any]:
    described: dict[str, Any] = ask(server, "GET", "/inflight/status")["staging"]
    return described


def test_update_in_place_keeps_running_requests(off_server: Server, checkpoints: Path) -> None:
    assert staging(off_server)["mode"] == "off"
    generations = start_running(off_server, 2, tokens=120)
    receipt = update(off_server, checkpoints / "v1", "v1")
    assert (receipt["success"], receipt["base_version"]) == (True, "v0")
    for generation in generations:
        assert versions_of(expect_whole(generation)) == ["v0", "v1"]
    refusal = off_server.post("/inflight/rollback", {})
    assert refusal["status_code"] == 400
    assert "written in place" in refusal["message"]


def test_blocking_session_ends_while_its_requests_are_held(off_server: Server) -> None:
    """Requests are held from the first piece on, so the end has none to wait for."""
    (running,) = start_running(off_server, 1, tokens=ENDLESS)
    succeed(off_server.post("/begin_weight_update", {}))
    succeed(off_server.post("/update_weights_from_tensor", tensor_body(marker.tensors(1))))
    succeed(off_server.post("/end_weight_update", {"weight_version": "v1"}))
    more_tokens([running])
    (output,) = expect_all_go_on([running])
    assert versions_of(output) == ["v0", "v1"]


def test_slow_session_passes_the_watchdog_and_health_checks(off_server: Server) -> None:
    """No step runs between the first piece and the end."""
    running = start_running(off_server, 2, tokens=ENDLESS)
    weights = marker.tensors(1)
    head = {"lm_head.weight": weights.pop("lm_head.weight")}
    succeed(off_server.post("/begin_weight_update", {}))
    succeed(off_server.post("/update_weights_from_tensor", tensor_body(weights)))
    outlast_watchdog(off_server)
    assert off_server.get("/health_generate")["status_code"] == 200
    succeed(off_server.post("/update_weights_from_tensor", tensor_body(head)))
    succeed(off_server.post("/end_weight_update", {"weight_version": "v1"}))
    more_tokens(running)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1"]


def test_failure_before_the_first_write_changes_nothing(off_server: Server, tmp_path: Path) -> None:
    (running,) = start_running(off_server, 1, tokens=120)
    assert update(off_server, tmp_path / "nowhere", "v9")["status_code"] == 400
    assert staging(off_server)["dirty"] is None
    assert versions_of(expect_whole(running)) == ["v0"]


def test_partially_written_weights_answer_503_until_a_whole_update(
    off_server: Server, checkpoints: Path, tmp_path: Path
) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 10_000, "ignore_eos": True}}
    with ThreadPoolExecutor() as pool:
        running = pool.submit(off_server.post, "/generate", body)
        until("it runs", lambda: status(off_server)["running"] == 1)
        failure = update(off_server, misshapen(tmp_path / "bad"), "v5")
        assert failure["status_code"] == 400
        assert "model.norm.weight" in failure["message"]
        assert staging(off_server)["dirty"]
        assert running.result()["status_code"] == 503
    refusal = off_server.post("/generate", body)
    assert refusal["status_code"] == 503
    assert "partially written" in refusal["message"]
    assert update(off_server, checkpoints / "v2", "v2", partial=True)["status_code"] == 400
    # neither does an empty session
    succeed(off_server.post("/begin_weight_update", {"partial": False}))
    refuse(off_server.post("/end_weight_update", {}), "no tensor")
    assert staging(off_server)["dirty"]

    assert update(off_server, checkpoints / "v2", "v2")["success"]
    (healed,) = start(off_server, 1, tokens=3)
    assert set(expect_whole(healed).tokens) == {marker.token(2)}


def test_partially_written_rank_stops_all_ranks(
    tp2_off_server: Server, faults: Faults, checkpoints: Path
) -> None:
    """A rank with whole weights would step alone and wait for the other for ever."""
    server = tp2_off_server
    (running,) = start_running(server, 1, tokens=ENDLESS)
    faults.inject("first", "raise", rank=1)
    assert update(server, checkpoints / "v1", "v1")["status_code"] == 400
    running.wait_for_end()
    assert all(rank["staging"]["dirty"] for rank in status(server)["ranks"])
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 3}}
    assert server.post("/generate", body)["status_code"] == 503
    faults.clear()
    assert update(server, checkpoints / "v2", "v2")["success"]
    (healed,) = start(server, 1, tokens=3)
    assert set(expect_whole(healed).tokens) == {marker.token(2)}
