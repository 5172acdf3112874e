"""Adapters of requests that a pause holds."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harness.marker import HEAD_DIM, HEADS, HIDDEN
from harness.server import Server, serve
from tests.support.load import (
    ENDLESS,
    ask,
    expect_all_go_on,
    pause,
    resume,
    start,
    start_running,
    until,
)
from tests.support.pool import ServerPool

RANK = 4

_serial = itertools.count()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It adds nothing: what matters is who uses it."""
    folder = tmp_path_factory.mktemp("adapter")
    layer = "base_model.model.model.layers.0.self_attn.o_proj"
    weights = {
        f"{layer}.lora_A.weight": torch.zeros(RANK, HEADS * HEAD_DIM, dtype=torch.bfloat16),
        f"{layer}.lora_B.weight": torch.zeros(HIDDEN, RANK, dtype=torch.bfloat16),
    }
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def lora_server(
    pool: ServerPool, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    pool.discard()  # one server at a time
    flags = (
        "--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(RANK),
        "--lora-target-modules", "o_proj", "--max-loras-per-batch", "4", "--weight-version", "v0",
    )  # fmt: skip
    log = tmp_path_factory.mktemp("logs") / "lora.log"
    with serve(checkpoints / "v0", *flags, log=log) as server:
        yield server


@pytest.fixture
def server(lora_server: Server) -> Iterator[Server]:
    yield lora_server
    resume(lora_server)
    ask(lora_server, "POST", "/abort_request", {"abort_all": True})


@pytest.fixture
def name(server: Server, adapter: Path) -> str:
    """An adapter of the test's own."""
    return load(server, adapter)


def load(server: Server, adapter: Path) -> str:
    name = f"adapter-{next(_serial)}"
    ask(server, "POST", "/load_lora_adapter", {"lora_name": name, "lora_path": str(adapter)})
    return name


def unload(server: Server, name: str) -> dict[str, Any]:
    answer: dict[str, Any] = server.post("/unload_lora_adapter", {"lora_name": name})
    return answer


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_adapter_of_paused_requests_stays(
    server: Server, adapter: Path, name: str, mode: str
) -> None:
    running = start_running(server, 2, tokens=ENDLESS, lora_path=name)
    pause(server, mode)
    answer = unload(server, name)
    assert answer["status_code"] == 409, answer
    assert f"'{name}'" in answer["message"]
    assert "2 paused requests" in answer["message"]
    # it keeps nobody else waiting, and nothing has become of the adapter
    assert unload(server, load(server, adapter))["success"]
    running += start(server, 1, tokens=ENDLESS, lora_path=name)
    resume(server)
    expect_all_go_on(running)
    assert unload(server, name)["success"]


def test_an_unloading_that_a_pause_overtakes(server: Server, adapter: Path, name: str) -> None:
    """It waits for requests, as SGLang has it, and a pause ends the waiting."""
    running = start_running(server, 1, tokens=ENDLESS, lora_path=name)
    with ThreadPoolExecutor() as threads:
        unloading = threads.submit(unload, server, name)
        begun = f"Start unload Lora adapter. Lora name={name}"
        until("it is begun", lambda: begun in server.log_text())
        running[0].wait_for_tokens(running[0].count + 3)
        assert not unloading.done()
        pause(server, "in_place")
        answer = unloading.result()
    assert answer["status_code"] == 400, answer
    assert "1 paused request " in answer["error_message"]
    assert unload(server, load(server, adapter))["success"]
    resume(server)
    expect_all_go_on(running)
    assert unload(server, name)["success"]


def test_an_adapter_that_nobody_uses_is_unloaded_in_a_pause(server: Server, name: str) -> None:
    running = start_running(server, 1, tokens=ENDLESS)
    pause(server, "in_place")
    assert unload(server, name)["success"]
    resume(server)
    expect_all_go_on(running)
