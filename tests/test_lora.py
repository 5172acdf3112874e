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

from harness import marker
from harness.marker import HEAD_DIM, HEADS, HIDDEN
from harness.server import Server, serve
from tests.support.load import (
    ENDLESS,
    ask,
    expect_all_go_on,
    pause,
    prompt,
    resume,
    start,
    start_running,
    until,
)
from tests.support.pool import ServerPool

RANK = 4

_serial = itertools.count()


def write_adapter(folder: Path, *, weight: float, rank: int = RANK) -> Path:
    """One that takes the hidden state times ``weight`` on top of it."""
    layer = "base_model.model.model.layers.0.self_attn.o_proj"
    down = torch.ones(rank, HEADS * HEAD_DIM, dtype=torch.bfloat16)
    up = torch.full((HIDDEN, rank), weight, dtype=torch.bfloat16)
    folder.mkdir(exist_ok=True)
    save_file(
        {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It adds nothing: what matters is who uses it."""
    return write_adapter(tmp_path_factory.mktemp("adapter"), weight=0.0)


@pytest.fixture(scope="module")
def other_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It turns the hidden state round, so that its token has the least logit of all."""
    return write_adapter(tmp_path_factory.mktemp("other"), weight=-10.0)


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
    env = {"SGLANG_INFLIGHT_VLLM_ROUTES": "1"}
    with serve(checkpoints / "v0", *flags, log=log, env=env) as server:
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


# ---- vLLM's trainers load an adapter again by its name -----------------------------------

OWN = marker.token(0)
# the first of all that have the same logit
OTHERS = 0
LOAD = ("/load_lora_adapter", "/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter")


def tokens_of(server: Server, name: str) -> list[int]:
    body = {
        "model": name,
        "token_ids": prompt(),
        "sampling_params": {"max_tokens": 3, "temperature": 0, "ignore_eos": True},
    }
    answer = ask(server, "POST", "/inference/v1/generate", body)
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def unloadings(server: Server) -> int:
    return server.log_text().count("LoRA adapter unloading completes")


@pytest.mark.parametrize("path", LOAD)
@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_a_name_passes_to_another_adapter(
    server: Server, adapter: Path, other_adapter: Path, path: str, paused: bool
) -> None:
    """Requests that run end with the adapter they began with, and nobody waits for them."""
    name = f"policy-{next(_serial)}"
    ask(server, "POST", path, {"lora_name": name, "lora_path": str(adapter)})
    assert tokens_of(server, name) == [OWN] * 3
    running = start_running(server, 2, tokens=ENDLESS, lora_path=name)
    before = unloadings(server)
    if paused:
        pause(server, "in_place")
    for step in range(2):
        folder = (other_adapter, adapter)[step]
        answer = ask(server, "POST", path, {"lora_name": name, "lora_path": str(folder)})
        assert answer["loaded_adapters"][name] == str(folder)
        if not paused:
            assert tokens_of(server, name) == [(OTHERS, OWN)[step]] * 3
    resume(server)
    assert tokens_of(server, name) == [OWN] * 3
    for output in expect_all_go_on(running):
        assert set(output.tokens) == {OWN}
    until("both old ones are unloaded", lambda: unloadings(server) == before + 2)
    assert ask(server, "POST", "/v1/unload_lora_adapter", {"lora_name": name})["success"]
    body = {"model": name, "token_ids": prompt(), "sampling_params": {"max_tokens": 1}}
    refused = server.post("/inference/v1/generate", body)
    assert refused["status_code"] == 404, refused
    assert f"'{name}'" in refused["error"]["message"]


def test_an_adapter_that_does_not_fit(server: Server, name: str, tmp_path: Path) -> None:
    """The name stays with the one that it has."""
    large = write_adapter(tmp_path / "large", weight=-10.0, rank=2 * RANK)
    body = {"lora_name": name, "lora_path": str(large)}
    refused = server.post("/skyrl/v1/load_lora_adapter", body)
    assert refused["status_code"] == 400, refused
    assert "rank" in refused["error"]["message"]
    assert tokens_of(server, name) == [OWN] * 3
    assert unload(server, name)["success"]
