"""A server's entry for a gateway's list says what the server is, serves and can do."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from harness import marker
from harness.server import Server, serve
from sglang_inflight.client import Client
from sglang_inflight.vocabulary.calls import TABLE
from sglang_inflight.vocabulary.version import VERSION
from tests.extensions.control_planes import in_engine
from tests.support.engine import run_script
from tests.support.load import ENDLESS, ask, pause, resume, start_running, status, until, update
from tests.support.updates import LIVE, drop_session, succeed, tensor_body, until_idle
from tests.support.workers import via_worker, workers

pytest_plugins = ["tests.support.fixtures"]

ENTRY = "/inflight/worker"
MODES = ["abort", "in_place", "retract", "wait"]


def entry_of(server: Server) -> Any:
    return ask(server, "GET", ENTRY)


def why_not_ready(server: Server) -> str | None:
    """Return what ``/ready`` says, or None for a ready server."""
    said: dict[str, Any] = server.get("/ready")
    return None if said["status_code"] == 200 else said["message"]


def expect_not_ready(server: Server, *words: str) -> None:
    entry = entry_of(server)
    assert entry["health"] == "not_ready"
    assert entry["why_not_ready"] == why_not_ready(server)
    assert all(word in entry["why_not_ready"] for word in words)


def expect_ready(server: Server) -> None:
    entry = entry_of(server)
    assert (entry["health"], entry["why_not_ready"]) == ("ready", None)
    assert why_not_ready(server) is None


def test_entry_of_an_idle_server_has_all_fields(any_server: Server, checkpoints: Path) -> None:
    now = status(any_server)
    entry = entry_of(any_server)
    assert {*TABLE} - {"flush_cache"} == {
        name
        for name, call in TABLE.items()
        if (call.path or "/").removeprefix("/") in entry["routes"]
    }
    del entry["routes"]
    model = str(checkpoints / "v0")
    assert entry == {
        "protocol_version": 1,
        "engine": "sglang",
        "engine_version": version("sglang"),
        "inflight_version": VERSION,
        "model": model,
        "model_id": model,
        "model_path": model,
        "worker_type": "regular",
        "connection_mode": "http",
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "world_size": 1,
        "health": "ready",
        "why_not_ready": None,
        "weight_version": "v0",
        "epoch": now["epoch"],
        "epochs": [now["epoch"]] * 2,
        "digest": now["digest"],
        "previous_version": now["previous_version"],
        "update": {
            "state": "empty",
            "update_id": None,
            "can_roll_back": now["staging"]["can_roll_back"],
            "refusal": None,
        },
        "pause": {
            "state": "running",
            "paused": False,
            "mode": None,
            "new_requests": "queue",
            "holders": 0,
        },
        "capabilities": {
            "pause_modes": MODES,
            "update_from": ["disk", "tensor", "distributed", "ipc", "peer", "parts"],
            "abort": True,
            "flush_cache": True,
            "sleep_wake": False,
            "reports_weight_version": True,
            "sessions": True,
            "two_phase": True,
            "transparent": False,
            "kv_max_age": True,
            "pin": True,
        },
    }


def test_entry_follows_commits_and_rollbacks(any_server: Server, checkpoints: Path) -> None:
    (running,) = start_running(any_server, 1, tokens=ENDLESS)
    receipt = update(any_server, checkpoints, 1, **LIVE)
    entry = entry_of(any_server)
    assert entry["model_path"] == str(checkpoints / "v1")
    assert (entry["weight_version"], entry["previous_version"]) == ("v1", "v0")
    assert (entry["epoch"], entry["epochs"]) == (receipt["epoch"], [receipt["epoch"]] * 2)
    assert entry["digest"] == receipt["ranks"][0]["digest"]
    assert entry["update"]["can_roll_back"]
    ask(any_server, "POST", "/inflight/rollback", {"expected_version": "v1"})
    entry = entry_of(any_server)
    assert (entry["weight_version"], entry["epoch"]) == ("v0", receipt["epoch"] + 1)
    running.abort()


def test_entry_counts_the_holders_of_a_pause(any_server: Server) -> None:
    pause(any_server, "retract")
    granted = pause(any_server, "in_place", new_requests="reject")
    assert entry_of(any_server)["pause"] == {
        "state": "frozen",
        "paused": True,
        "mode": "in_place",
        "new_requests": "reject",
        "holders": 2,
    }
    expect_not_ready(any_server, "paused")
    resume(any_server, pause_id=granted["pause_id"])
    held = entry_of(any_server)["pause"]
    assert (held["mode"], held["new_requests"], held["holders"]) == ("retract", "queue", 1)
    resume(any_server)
    expect_ready(any_server)


def test_entry_names_the_open_session(any_server: Server) -> None:
    begin = {"non_blocking": True, "new_id": "step-1"}
    succeed(any_server.post("/begin_weight_update", begin))
    session: dict[str, Any] = {"session_id": "step-1"}
    succeed(
        any_server.post("/update_weights_from_tensor", tensor_body(marker.tensors(1), **session))
    )
    opened = entry_of(any_server)["update"]
    assert opened["state"] == "open"
    assert opened["update_id"] == status(any_server)["staging"]["update_id"] is not None
    succeed(any_server.post("/seal_weight_update", session))
    assert entry_of(any_server)["update"]["state"] == "sealed"
    drop_session(any_server)
    until_idle(any_server)
    assert entry_of(any_server)["update"]["state"] == "empty"
    expect_ready(any_server)


def test_server_behind_its_fleet_is_not_ready(any_server: Server) -> None:
    ask(any_server, "POST", "/inflight/expect", {"weight_version": "v9"})
    expect_not_ready(any_server, "the fleet serves version 'v9'")
    ask(any_server, "POST", "/inflight/expect", {})
    expect_ready(any_server)


def test_client_reads_the_entry(any_server: Server) -> None:
    with Client(any_server.url) as client:
        assert client.worker().as_json() == entry_of(any_server)


def test_server_that_writes_in_place_promises_no_second_phase(off_server: Server) -> None:
    able = entry_of(off_server)["capabilities"]
    assert (able["sessions"], able["two_phase"]) == (True, False)
    assert "disk" in able["update_from"]


@pytest.mark.parametrize(
    ("fixture", "size"), [("tp2_server", "tp_size"), ("dp2_server", "dp_size")]
)
def test_entry_of_two_ranks_is_as_short_as_that_of_one(
    fixture: str, size: str, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(fixture)
    entry = entry_of(server)
    assert (entry["world_size"], entry[size]) == (2, 2)
    assert {entry["tp_size"], entry["dp_size"]} == {1, 2}
    # SGLang's paths of the model are as long as their folders' names
    del entry["model"], entry["model_id"], entry["model_path"]
    assert len(json.dumps(entry)) < 2048
    assert entry["epochs"] == [rank["epoch"] for rank in status(server)["ranks"]]


def test_transparent_window_leaves_the_server_ready(
    transparent_server: Server, checkpoints: Path
) -> None:
    assert entry_of(transparent_server)["capabilities"]["transparent"]
    pause(transparent_server, "in_place")
    update(transparent_server, checkpoints, 1)
    entry = entry_of(transparent_server)
    assert (entry["pause"]["paused"], entry["weight_version"]) == (False, "v0")
    assert entry["update"]["state"] == "open"
    expect_ready(transparent_server)
    resume(transparent_server)
    assert entry_of(transparent_server)["weight_version"] == "v1"


def test_each_tokenizer_worker_gives_the_entry(workers_server: Server, checkpoints: Path) -> None:
    until("there are two workers", lambda: len(workers(workers_server)) == 2)
    for process in workers(workers_server):
        with via_worker(workers_server, process) as server:
            expect_ready(server)
            entry = entry_of(server)
            assert entry["capabilities"]["sleep_wake"]
            assert entry["capabilities"]["pause_modes"] == MODES
            assert "begin_weight_update" in entry["routes"]
    update(workers_server, checkpoints, 1, **LIVE)
    pause(workers_server, "in_place")
    for process in workers(workers_server):
        with via_worker(workers_server, process) as server:
            expect_not_ready(server, "paused")
            entry = entry_of(server)
            assert (entry["weight_version"], entry["previous_version"]) == ("v1", "v0")
            assert entry["model_path"] == str(checkpoints / "v1")
            assert entry["pause"]["holders"] == 1
    resume(workers_server)


def test_entry_needs_the_admin_key(workers_server: Server) -> None:
    for headers in {}, {"Authorization": "Bearer guess"}:
        assert workers_server.get(ENTRY, headers=headers)["status_code"] == 401
    expect_ready(workers_server)


def test_decode_server_lists_what_its_pair_allows(checkpoints: Path, tmp_path: Path) -> None:
    """Its re-prefill requests carry no key, so with a key it retracts nothing."""
    flags = [
        "--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake",
        "--disaggregation-decode-retraction-backup", "cpu_tensor", "--api-key", "key",
    ]  # fmt: skip
    with serve(checkpoints / "v0", *flags, log=tmp_path / "server.log") as server:
        server.headers = {"Authorization": "Bearer key"}
        entry = entry_of(server)
    assert entry["worker_type"] == "decode"
    able = entry["capabilities"]
    assert able["pause_modes"] == ["abort", "in_place", "wait"]
    assert (able["kv_max_age"], able["pin"], able["two_phase"]) == (False, False, True)


def test_engine_has_the_entry_as_a_method(checkpoints: Path, tmp_path: Path) -> None:
    waited, awaited, paused = run_script(in_engine.__name__, checkpoints / "v0", tmp_path)
    assert waited == awaited
    assert (waited["model"], waited["health"]) == ("the-model", "ready")
    assert (paused["health"], paused["pause"]["holders"]) == ("not_ready", 1)
    assert waited["capabilities"]["pause_modes"] == MODES
