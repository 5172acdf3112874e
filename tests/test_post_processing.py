"""In-place updates, by SGLang's own steps, of a model post-processed after loading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import marker
from harness.server import Server, serve
from harness.trainer import Trainers
from tests.support import post_processed
from tests.support.checkpoint_engine import leaves_once_met
from tests.support.load import (
    ENDLESS,
    Generation,
    ask,
    expect_all_go_on,
    more_tokens,
    pause,
    resume,
    start_running,
    status,
    versions_of,
)
from tests.support.updates import Sender, expect_served, misshapen, refuse, succeed, tensor_body

pytest_plugins = ["tests.support.fixtures"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("post_processing")
    for version in range(6):
        post_processed.build(made / f"v{version}", version)
    return made


# the setting, and a model whose finishing cannot be repeated
IN_PLACE = {
    "off": {"SGLANG_INFLIGHT_STAGING": "off"},
    "unproven": {"INFLIGHT_TEST_UNREPEATABLE": "1"},
    "unproven-at-start": {"INFLIGHT_TEST_UNREPEATABLE": "1", "SGLANG_INFLIGHT_PROOF": "start"},
}


@pytest.fixture(scope="module", params=list(IN_PLACE))
def why(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(folder: Path, trainers: Trainers, why: str) -> Iterator[Server]:
    flags = ("--weight-version", "v0")
    env = {**post_processed.ENV, **IN_PLACE[why]}
    with serve(folder / "v0", *flags, log=folder / f"{why}.log", env=env) as server:
        yield server


@pytest.fixture
def sender(folder: Path, trainers: Trainers) -> Sender:
    return Sender(folder, folder, trainers, post_processed)


def test_updates_in_place_keep_running_requests(server: Server, sender: Sender, why: str) -> None:
    """Requests wait during the write."""
    assert (status(server)["staging"]["mode"] == "off") is (why != "unproven")
    assert status(server)["staging"]["refusal"] is None
    before = status(server)["weight_version"]
    running = start_running(server, 2, tokens=ENDLESS)
    sources = ["disk", "tensor", "tensor_bucket", "distributed", "ipc"]
    for version, source in enumerate(sources, start=1):
        fields: dict[str, Any] = {
            "weight_version": f"v{version}",
            "kv_cache": "keep",
            "non_blocking": True,
        }
        receipt = succeed(sender.send(server, source, version, **fields))
        assert receipt["staged_as"]["form"] == "off"
        assert receipt["held_s"] > 0
        more_tokens(running)
    for output in expect_all_go_on(running):
        assert versions_of(output) == [before, "v1", "v2", "v3", "v4", "v5"]
    refuse(server.post("/inflight/rollback", {}), "in place")
    described = status(server)
    if why == "unproven":
        assert described["staging"]["proof"]["state"] == "failed"
        assert "'lm_head.serial'" in described["staging"]["proof"]["why"]
        assert "'lm_head.serial'" in receipt["staged_as"]["why"]
    elif why == "unproven-at-start":
        assert "'lm_head.serial'" in described["capabilities"]["stage"]


def test_trainer_leaving_before_its_first_tensor_fails_the_update_at_once(server: Server) -> None:
    """The scheduler's thread receives the tensors, so waiting for the timeout would stop all
    requests.
    """
    before = status(server)["weight_version"]
    running = start_running(server, 2, tokens=ENDLESS)
    with leaves_once_met() as handles:
        body = {"zmq_handles": handles, "weight_version": "lost", "non_blocking": True}
        refuse(server.post("/update_weights_from_ipc", body), "closed its socket")
    assert status(server)["staging"]["dirty"] is None
    more_tokens(running)
    for output in expect_all_go_on(running):
        assert versions_of(output) == [before]


def test_sglangs_own_call_sequence_updates_while_paused(server: Server) -> None:
    """The sequence is pause, begin, pieces, end; then one partial update."""
    weights = marker.tensors(3)
    head = {"lm_head.weight": weights.pop("lm_head.weight")}
    pause(server, "retract")
    succeed(server.post("/begin_weight_update", {}))
    for piece in (weights, head):
        succeed(server.post("/update_weights_from_tensor", tensor_body(piece)))
    succeed(server.post("/end_weight_update", {}))
    resume(server)
    expect_served(server, 3)
    head = {"lm_head.weight": marker.tensors(4)["lm_head.weight"]}
    succeed(server.post("/update_weights_from_tensor", tensor_body(head, weight_version="v4")))
    expect_served(server, 4)


def test_blocking_session_ends_while_its_requests_are_held(server: Server) -> None:
    """Requests are held from the first piece on, so the end has none to wait for."""
    running = start_running(server, 1, tokens=ENDLESS)
    succeed(server.post("/begin_weight_update", {}))
    succeed(server.post("/update_weights_from_tensor", tensor_body(marker.tensors(2))))
    succeed(server.post("/end_weight_update", {"weight_version": "v2"}))
    more_tokens(running)
    (output,) = expect_all_go_on(running)
    assert versions_of(output)[-1] == "v2"


def test_empty_session_post_processes_the_weights_anew(server: Server, folder: Path) -> None:
    """SGLang allows an empty session: another writer may have changed the weights."""
    ask(server, "POST", "/update_weights_from_disk", {"model_path": str(folder / "v1")})
    epoch = status(server)["epoch"]
    succeed(server.post("/begin_weight_update", {}))
    receipt = succeed(server.post("/end_weight_update", {"weight_version": "v1"}))
    assert (receipt["tensors"], receipt["epoch"]) == (0, epoch + 1)
    expect_served(server, 1)


def test_overwritten_weights_are_served_only_after_a_whole_update(
    server: Server, folder: Path
) -> None:
    """Writes into post-processed weights cannot be counted, so a partial update is refused."""
    succeed(server.post("/weights_checker", {"action": "reset_tensors"}))
    described = status(server)
    assert "reset_tensors" in described["staging"]["dirty"]
    assert described["digest"] is None
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 3}}
    assert server.post("/generate", body)["status_code"] == 503
    head = {"lm_head.weight": marker.tensors(4)["lm_head.weight"]}
    answer = server.post("/update_weights_from_tensor", tensor_body(head, non_blocking=True))
    refuse(answer, "only a whole update")
    ask(server, "POST", "/update_weights_from_disk", {"model_path": str(folder / "v3")})
    assert status(server)["staging"]["dirty"] is None
    expect_served(server, 3)


def test_failure_during_the_write_stops_generation_until_a_whole_update(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    torn = misshapen(tmp_path / "torn", post_processed.CONFIG)
    refuse(server.post("/update_weights_from_disk", {"model_path": str(torn)}), "model.norm.weight")
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 3}}
    assert server.post("/generate", body)["status_code"] == 503
    succeed(server.post("/update_weights_from_disk", {"model_path": str(folder / "v2")}))
    assert Generation(server, tokens=3).output().tokens == [marker.token(2)] * 3
