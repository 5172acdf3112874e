"""SkyRL, prime-rl and TRL, whose clients support only vLLM's server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.server import Server
from harness.trainer import Trainer
from tests.support.load import prompt, settle, start, start_running
from tests.support.updates import expect_served, serving
from tests.support.vllm import VLLMClient, expect_versions_of, make_rollouts
from tests.support.vllm_frameworks import FRAMEWORKS, Client, Framework, rpc

pytest_plugins = ["tests.support.fixtures"]


@pytest.fixture(scope="session")
def weight_dirs(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders in prime-rl's form: weights and a marker file, without a config."""
    folder = tmp_path_factory.mktemp("weight_dirs")
    for version in (1, 2):
        (folder / f"v{version}").mkdir()
        file = f"v{version}/model.safetensors"
        shutil.copyfile(checkpoints / file, folder / file)
        (folder / f"v{version}" / "NCCL_READY").touch()
    return folder


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    return FRAMEWORKS[request.param]


@pytest.fixture
def client(
    vllm_server: Server, framework: Framework, weight_dirs: Path, trainer: Trainer
) -> Client:
    return Client(vllm_server, framework, weight_dirs, trainer)


def test_training_steps_keep_rollouts_and_label_their_tokens(
    vllm_server: Server, client: Client
) -> None:
    client.connect()
    rollouts = make_rollouts(vllm_server, 3)
    for version in (1, 2):
        client.pause()
        counts = [len(rollout.tokens) for rollout in rollouts]
        client.send(version)
        client.resume()
        for rollout, count in zip(rollouts, counts, strict=True):
            rollout.wait_for_tokens(count + 6)
    expect_versions_of(rollouts, [0, 1, 2])
    # none of these clients sets a version
    assert vllm_server.get("/weight_info")["weight_version"] == "v0"


def test_failed_step_leaves_the_next_step_working(vllm_server: Server, client: Client) -> None:
    """Each client's ``finally`` resumes generation."""
    client.connect()
    before = serving(vllm_server)
    rollouts = make_rollouts(vllm_server, 2)
    client.pause()
    assert client.fail()
    client.resume()
    for rollout in rollouts:
        rollout.wait_for_tokens(len(rollout.tokens) + 3)
    assert serving(vllm_server) == before
    client.pause()
    client.send(1)
    client.resume()
    expect_versions_of(rollouts, [0, 1])


# ---- SkyRL -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "arguments", "code", "words"),
    [
        ("save_model", {}, 501, ("'save_model'", "skyrl_start_weight_update")),
        ("update_weights_ipc", {"update_info": {}}, 400, ("init_weight_transfer_engine",)),
        ("skyrl_start_weight_update", {"is_checkpoint_format": False}, 501, ("checkpoint",)),
        ("skyrl_start_weight_update", {"format": "kernel"}, 400, ("kwargs", "`format`")),
        ("skyrl_start_weight_update", {}, 400, ("init_weight_transfer_engine",)),
        ("update_weights_nccl", {"update_info": {}}, 400, ("init_weight_transfer_engine",)),
        ("skyrl_finish_weight_update", {}, 400, ("no weight update",)),
        ("skyrl_sleep_for_weight_sync", {}, 409, ("not paused",)),
        ("skyrl_wake_for_weight_sync", {"tags": ["soon"]}, 400, ("kwargs", "'soon'")),
    ],
)
def test_bad_collective_rpc_is_refused(
    vllm: VLLMClient, method: str, arguments: dict[str, Any], code: int, words: tuple[str, ...]
) -> None:
    vllm.refuse("/collective_rpc", *words, status=code, json=rpc(method, arguments).body)


def test_collective_rpc_with_unnamed_arguments_is_refused(vllm: VLLMClient) -> None:
    body = {"method": "skyrl_start_weight_update", "args": [True]}
    vllm.refuse("/collective_rpc", "1 positional", status=501, json=body)
    vllm.refuse("/collective_rpc", "`method`", json={})


@pytest.mark.parametrize("packed", [True, False])
def test_packed_of_an_update_overrides_the_init_info(
    vllm_server: Server, vllm: VLLMClient, trainer: Trainer, packed: bool
) -> None:
    vllm.init_weight_transfer_engine(trainer, packed=not packed)
    vllm.send_weights(trainer, 1, packed=packed, says_packed=True)
    expect_served(vllm_server, 1)
    vllm.shutdown_weight_transfer_engine(trainer)


def test_reset_prefix_cache_reads_a_body(vllm_server: Server, vllm: VLLMClient) -> None:
    """SkyRL sends a body, vLLM takes a query."""
    running = start_running(vllm_server, 1, tokens=8000)
    assert vllm.post("/reset_prefix_cache", {"reset_running_requests": False}) == {"success": False}
    assert vllm.post("/reset_prefix_cache", {"reset_running_requests": True}) == {"success": True}
    vllm.refuse("/reset_prefix_cache", "reset_running", json={"reset_running_requests": "x"})
    running[0].wait_for_tokens(running[0].count + 3)


def test_tokenize_and_detokenize_have_vllms_form(vllm_server: Server, vllm: VLLMClient) -> None:
    url = vllm_server.url
    model = "default"
    body = {"model": model, "prompt": "t5 t6", "add_special_tokens": True}
    tokens = httpx.post(url + "/tokenize", json=body, timeout=60).json()
    assert (tokens["tokens"], tokens["count"]) == ([5, 6], 2)
    body = {"model": model, "tokens": [5, 6]}
    text = httpx.post(url + "/detokenize", json=body, timeout=60).json()
    assert text == {"text": "t5 t6", "prompt": "t5 t6"}
    body = {"model": model, "tokens": [[5], [6]]}
    texts = httpx.post(url + "/detokenize", json=body, timeout=60).json()
    assert texts == {"text": ["t5", "t6"], "prompt": ["t5", "t6"]}
    bad = httpx.post(url + "/detokenize", json={"tokens": [[5], ["x"]]}, timeout=60)
    assert bad.status_code == 400


def test_weights_in_kernel_format_are_refused(vllm: VLLMClient) -> None:
    """TRL and SkyRL can send deltas in the kernels' layout."""
    for path in ("/start_weight_update", "/start_draft_weight_update"):
        body = {"is_checkpoint_format": False}
        vllm.refuse(path, "as a checkpoint has them", status=501, json=body)


def test_salted_conversation_finds_its_kv_after_an_update(
    vllm_server: Server, client: Client, framework: Framework
) -> None:
    """A salt separates rollouts by itself. Requests without one find no KV of older weights."""
    # TRL leaves vLLM's default: the pause clears the cache
    clears_cache = framework is FRAMEWORKS["trl"]
    client.connect()
    input_ids = prompt(64)

    def cached(**fields: Any) -> int:
        (generation,) = start(vllm_server, 1, tokens=2, input_ids=input_ids, **fields)
        # these clients do not name the version, so its tokens do not show it
        tokens: int = generation.output().meta["cached_tokens"]
        return tokens

    assert (cached(), cached(cache_salt="rollout")) == (0, 0)
    client.pause()
    client.send(1)
    client.resume()
    assert (cached(), cached(cache_salt="rollout")) == (0, 0 if clears_cache else 63)


# ---- prime-rl --------------------------------------------------------------------------


def test_bad_weight_dir_is_refused(vllm_server: Server, vllm: VLLMClient) -> None:
    before = serving(vllm_server)
    vllm.refuse("/update_weights", "filesystem", json={"weight_dir": None})
    vllm.refuse("/update_weights", "`$.weight_dir`", json={"weight_dir": 7})
    vllm.refuse("/update_weights", "/nowhere", json={"weight_dir": "/nowhere"})
    assert serving(vllm_server) == before


def test_liveness_passes_while_paused(vllm_server: Server, vllm: VLLMClient) -> None:
    assert vllm.get("/liveness") == {"status": "ok"}
    vllm.post("/pause", mode="keep", clear_cache=False)
    assert vllm.get("/liveness") == {"status": "ok"}
    vllm.post("/resume")


def test_update_keeps_the_served_models_name(
    vllm_server: Server, vllm: VLLMClient, weight_dirs: Path
) -> None:
    """prime-rl looks it up after a restart, and SkyRL sends it with each request."""
    (model,) = vllm.get("/v1/models")["data"]
    vllm.post("/update_weights", {"weight_dir": str(weight_dirs / "v1")})
    assert vllm.get("/v1/models")["data"][0]["id"] == model["id"]
    body = {"model": model["id"], "token_ids": prompt(), "sampling_params": {"max_tokens": 1}}
    assert vllm.post("/inference/v1/generate", body)["model"] == model["id"]


def test_lora_routes_without_enable_lora_are_refused(vllm: VLLMClient, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    body = {"lora_name": "a", "lora_path": str(tmp_path)}
    for path in ("/load_lora_adapter", "/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter"):
        vllm.refuse(path, "--enable-lora", json=body)
        vllm.refuse(path, "adapter_config", status=404, json={**body, "lora_path": "/nowhere"})
    vllm.refuse("/v1/unload_lora_adapter", "not loaded", status=404, json={"lora_name": "a"})


def test_keep_pause_holds_requests_until_its_end(vllm_server: Server, client: Client) -> None:
    client.connect()
    running = start_running(vllm_server, 2, tokens=8000)
    client.pause()
    counts = settle(vllm_server, running)
    client.send(1)
    assert settle(vllm_server, running) == counts
    client.resume()
    for generation, count in zip(running, counts, strict=True):
        generation.wait_for_tokens(count + 3)
