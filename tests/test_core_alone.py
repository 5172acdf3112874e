"""A server without extensions (``SGLANG_INFLIGHT_EXTENSIONS=none``) does the core's work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import marker
from harness.server import Server
from tests.support.load import (
    ENDLESS,
    expect_all_go_on,
    expect_spans_in_chunks,
    pause,
    resume,
    settle,
    start_running,
    status,
)
from tests.support.pool import FLAVOURS, ServerPool
from tests.support.updates import (
    V1,
    expect_served,
    expect_to_run_on,
    refuse,
    succeed,
    tensor_body,
)


@pytest.fixture
def core_server(pool: ServerPool) -> Iterator[Server]:
    yield pool.get(FLAVOURS["core_server"])
    pool.restore()


def test_core_alone_changes_weights_of_running_requests(core_server: Server) -> None:
    running = start_running(core_server, 3, tokens=ENDLESS)
    body = tensor_body(marker.tensors(1), **V1)
    receipt = succeed(core_server.post("/update_weights_from_tensor", body))
    assert receipt["weight_version"] == "v1"
    expect_to_run_on(core_server, running, [0, 1])
    for generation in running:
        expect_spans_in_chunks(generation.output())
    expect_served(core_server, 1)


def test_core_alone_pauses_between_steps(core_server: Server) -> None:
    running = start_running(core_server, 2, tokens=ENDLESS)
    granted = pause(core_server, "in_place")
    settle(core_server, running)
    assert status(core_server)["state"] == "frozen"
    resume(core_server, pause_id=granted["pause_id"])
    expect_all_go_on(running)


def test_calls_of_extensions_are_not_there(core_server: Server, tmp_path: Path) -> None:
    assert status(core_server)["extensions"] == []
    for path in (
        "/inflight/save",
        "/inflight/discard",
        "/inflight/offer",
        "/inflight/worker",
        "/pause",
        "/inference/v1/generate",
    ):
        answer = core_server.post(path, {"path": str(tmp_path)})
        assert answer["status_code"] == 404, (path, answer)
    served = {"model_path": str(tmp_path), "load_format": "served", "non_blocking": True}
    refuse(core_server.post("/update_weights_from_disk", served), "is off")
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        refuse(core_server.post(path, {}), "is off", status_code=501)
    adapter = {"lora_name": "a", "lora_path": str(tmp_path)}
    sglangs = core_server.post("/load_lora_adapter", adapter)
    assert sglangs["status_code"] == 400
    assert "LoRA is not enabled" in sglangs["error_message"]
    for custom in ({"min_epoch": 0}, {"max_version_lag": 1}, {"weight_version": "v0"}):
        body = {"input_ids": [5, 6], "sampling_params": {"custom_params": custom}}
        asked = core_server.post("/generate", body)
        assert (asked["status_code"], "is off" in str(asked)) == (400, True), asked
    asked = core_server.post("/generate", {"input_ids": [5, 6], "min_epoch": 0})
    assert (asked["status_code"], "is off" in str(asked)) == (400, True), asked
    expect_served(core_server, 0)
