"""Sources of weights that are slow, gone or changing do not disturb later updates."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from harness import marker
from harness.server import PLAIN, RUNNING, START_TIMEOUT_S, Server, serve
from tests.support.checkpoint_engine import checkpoint_engine
from tests.support.environment import HUB
from tests.support.faults import Faults
from tests.support.load import ENDLESS, start_running, until
from tests.support.pool import CUSTOM_LOADER, ServerPool
from tests.support.stalled_mount import stalled_mount
from tests.support.stopped_sender import stopped_sender
from tests.support.updates import (
    V1,
    Call,
    Sender,
    expect_served,
    expect_to_run_on,
    refuse,
    serving,
    succeed,
    tensor_body,
    until_staging,
)

pytest_plugins = ["tests.support.fixtures"]

DISK, TENSOR = "/update_weights_from_disk", "/update_weights_from_tensor"
# timeout of an update without an end
SHORT_S = 1.0


@pytest.fixture
def folder(checkpoints: Path, tmp_path: Path) -> Path:
    """Checkpoint v1, in a folder whose name is also a glob pattern."""
    return Path(shutil.copytree(checkpoints / "v1", tmp_path / "run[1]*"))


def pickle_weights(folder: Path, file: str, **how: Any) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(marker.tensors(1), folder / file, **how)


@pytest.mark.parametrize(
    ("load_format", "file", "how"),
    [
        (None, None, {}),
        ("auto", None, {}),
        ("SafeTensors", None, {}),
        ("fastsafetensors", None, {}),
        ("mistral", "consolidated.safetensors", {}),
        (None, "pytorch_model.bin", {}),
        (None, "pytorch_model.bin", {"_use_new_zipfile_serialization": False}),
        ("pt", "model.pt", {}),
    ],
)
def test_update_reads_each_checkpoint_format(
    server: Server, folder: Path, load_format: str | None, file: str | None, how: dict[str, Any]
) -> None:
    if file is not None and file.endswith("safetensors"):
        (folder / "model.safetensors").rename(folder / file)
    elif file is not None:
        pickle_weights(folder, file, **how)
    before = sorted(path.name for path in folder.iterdir())
    body = {"model_path": str(folder), "load_format": load_format}
    succeed(server.post(DISK, {**V1, **body}))
    expect_served(server, 1)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_end_token_that_is_not_taken_over_is_told_in_the_receipt(
    server: Server, folder: Path
) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    receipt = succeed(server.post(DISK, {**V1, "model_path": str(folder)}))
    (warning,) = receipt["warnings"]
    assert "[2, 9]" in warning
    (folder / "generation_config.json").unlink()
    assert succeed(server.post(DISK, {**V1, "model_path": str(folder)}))["warnings"] == []


def test_update_ignores_files_missing_from_the_index(server: Server, tmp_path: Path) -> None:
    """Some published models hold the shards and the whole; here the whole is another version."""
    folder = marker.build(tmp_path / "v1", 1, shards=3)
    shutil.copy(
        marker.build(tmp_path / "v2", 2) / "model.safetensors", folder / "whole.safetensors"
    )
    succeed(server.post(DISK, {**V1, "model_path": str(folder)}))
    expect_served(server, 1)


def test_stalled_mount_fails_its_update_at_the_timeout(
    server: Server, tmp_path: Path, checkpoints: Path
) -> None:
    """Neither tokens nor the next update wait for the mount."""
    running = start_running(server, 2, tokens=ENDLESS)
    before = serving(server)
    with stalled_mount(tmp_path):
        body = {**V1, "model_path": str(tmp_path), "timeout_s": SHORT_S}
        refuse(server.post(DISK, body), "time ran out")
        assert serving(server) == before
        for generation in running:
            generation.wait_for_tokens(generation.count + 3)
        succeed(server.post(DISK, {**V1, "model_path": str(checkpoints / "v1")}))
        expect_to_run_on(server, running, [0, 1])


def test_stopped_sender_fails_its_update_at_the_timeout(server: Server, sender: Sender) -> None:
    with stopped_sender() as payload:
        running = start_running(server, 2, tokens=ENDLESS)
        before = serving(server)
        body = {**V1, "serialized_named_tensors": [payload], "timeout_s": SHORT_S}
        refuse(server.post(TENSOR, body), "time ran out")
        assert serving(server) == before
        succeed(sender.send(server, "tensor_shared", 1, **V1))
        expect_to_run_on(server, running, [0, 1])
    expect_served(server, 1)


def cut(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(100)


def write_another(file: Path) -> None:
    """Overwrite the file, like a trainer with one name for its latest step."""
    shutil.copyfile(marker.build(file.parent / "next", 2) / file.name, file)


@pytest.mark.parametrize("change", [cut, write_another, Path.unlink])
def test_checkpoint_changed_during_staging_is_refused(
    faulty_server: Server, faults: Faults, folder: Path, change: Callable[[Path], None]
) -> None:
    server = faulty_server
    running = start_running(server, 2, tokens=ENDLESS)
    before = serving(server)
    faults.inject("middle", "hang")
    call = Call(server, DISK, {**V1, "model_path": str(folder)})
    # now the file is open and some tensors are staged
    until_staging(server, tensors=5)
    change(folder / "model.safetensors")
    faults.clear()
    refuse(call.answer(), str(folder), "model.safetensors")
    assert serving(server) == before
    # a whole version, as the marker's tokens show
    succeed(server.post(TENSOR, {**V1, **tensor_body(marker.tensors(1))}))
    expect_to_run_on(server, running, [0, 1])


def test_custom_loader_runs_between_steps(normal_loop_server: Server) -> None:
    server = normal_loop_server
    running = start_running(server, 2, tokens=ENDLESS)
    body = {**V1, **tensor_body(marker.tensors(1)), "load_format": CUSTOM_LOADER}
    succeed(server.post(TENSOR, body))
    expect_to_run_on(server, running, [0, 1])


def send_when_it_answers() -> dict[str, Any]:
    """Send the first weights once the server answers, as checkpoint-engine does."""

    def answers() -> bool:
        try:
            return bool(RUNNING) and httpx.get(f"{RUNNING[0].url}/is_paused", **PLAIN).is_success
        except httpx.HTTPError:
            return False

    until("the server answers", answers, patience_s=START_TIMEOUT_S)
    with checkpoint_engine(marker.tensors(1)) as (_, handles):
        body = {"zmq_handles": handles, "weight_version": "v1"}
        answer: dict[str, Any] = RUNNING[0].post("/update_weights_from_ipc", body)
        return answer


@pytest.mark.parametrize("workers", [1, 2])
def test_server_waiting_for_its_first_weights_becomes_ready(
    checkpoints: Path, pool: ServerPool, tmp_path: Path, workers: int
) -> None:
    pool.discard()
    log = tmp_path / "server.log"
    flags = ("--checkpoint-engine-wait-weights-before-ready", "--tokenizer-worker-num")
    with ThreadPoolExecutor(1) as sending:
        sent = sending.submit(send_when_it_answers)
        with serve(checkpoints / "v0", *flags, str(workers), log=log) as server:
            assert sent.result()["success"], sent.result()
            assert "Weights are ready after" in server.log_text()
            assert "Weights are not ready" not in server.log_text()
            assert server.get("/model_info")["weight_version"] == "v1"


def on_the_hub(cache: Path, name: str, checkpoint: Path) -> None:
    """Store ``checkpoint`` in the layout of the Hub client's cache."""
    commit = "0" * 40
    model = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(checkpoint, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)


@pytest.mark.parametrize("place", ["cache", "download_dir"])
def test_update_from_a_hub_name_goes_live(
    checkpoints: Path, pool: ServerPool, tmp_path: Path, place: str
) -> None:
    pool.discard()
    name, flags, folder = f"someone/trained_{place}", ["--weight-version", "v0"], HUB
    if place == "download_dir":
        folder = tmp_path / "hub"
        flags += ["--download-dir", str(folder)]
    on_the_hub(folder, name, checkpoints / "v1")
    with serve(checkpoints / "v0", *flags, log=tmp_path / "log") as server:
        generations = start_running(server, 2, tokens=ENDLESS)
        body = {"model_path": name, **V1}
        succeed(server.post(DISK, body))
        assert server.get("/model_info")["weight_version"] == "v1"
        refuse(server.post(DISK, body | {"model_path": "someone/else"}), "'someone/else'", "Hub")
        expect_to_run_on(server, generations, [0, 1])
