"""LoRA adapters loaded, replaced and unloaded under requests that use them."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from harness import marker
from harness.server import Server, schedulers
from tests.support import lora, trl
from tests.support.engine import run_script
from tests.support.load import (
    ENDLESS,
    Generation,
    Output,
    ask,
    expect_all_go_on,
    labels_of,
    more_tokens,
    pause,
    prompt,
    resume,
    settle,
    start,
    start_running,
    status,
    until,
)
from tests.support.lora import RANK
from tests.support.memory_release import release, resume_memory
from tests.support.pool import FLAVOURS, Flavour, ServerPool
from tests.support.workers import via_worker, workers

_serial = itertools.count()

LORA = (
    "--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(RANK),
    "--lora-target-modules", "o_proj", "--weight-version", "v0",
)  # fmt: skip
MAX_LOADED = 3
LIMITED = ("--max-loras-per-batch", str(MAX_LOADED), "--max-loaded-loras", str(MAX_LOADED))
FLAVOURS |= {
    "lora_overlap": Flavour(
        (*LORA, "--max-loras-per-batch", "4", "--enable-memory-saver"),
        {"SGLANG_INFLIGHT_VLLM_ROUTES": "1"},
        model=lora.build_model,
    ),
    "lora_normal": Flavour((*LORA, *LIMITED, "--disable-overlap-schedule"), model=lora.build_model),
    "lora_workers": Flavour(
        (*LORA, *LIMITED, "--tokenizer-worker-num", "2"),
        {
            "SGLANG_INFLIGHT_VLLM_ROUTES": "1",
            # seconds until uvicorn replaces a dead worker
            "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "3",
        },
        model=lora.build_model,
    ),
    "lora_tp2": Flavour(
        (*LORA, "--max-loras-per-batch", "4", "--tp-size", "2"), model=lora.build_model
    ),
}


def on(*kinds: str) -> pytest.MarkDecorator:
    flavours = [f"lora_{kind}" for kind in kinds]
    return pytest.mark.parametrize("lora_server", flavours, indirect=True)


@pytest.fixture
def lora_server(request: pytest.FixtureRequest, pool: ServerPool) -> Server:
    return pool.get(FLAVOURS[request.param])


@pytest.fixture
def server(lora_server: Server) -> Iterator[Server]:
    """A server left without requests and adapters after the test."""
    yield lora_server
    resume(lora_server)
    ask(lora_server, "POST", "/abort_request", {"abort_all": True})
    for name in loaded(lora_server):
        assert unload(lora_server, name)["success"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters by number."""
    root = tmp_path_factory.mktemp("adapters")
    return [lora.write(root / str(number), lora.tensors(number)) for number in range(3)]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that changes no token, for tests about requests' references to adapters."""
    return lora.write(tmp_path_factory.mktemp("adapter"), lora.uniform(0.0))


@pytest.fixture(scope="module")
def other_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that negates the hidden state, so that the usual token gets the least logit."""
    return lora.write(tmp_path_factory.mktemp("other"), lora.uniform(-10.0))


@pytest.fixture
def name(server: Server, adapter: Path) -> str:
    """An adapter of the test's own."""
    return load(server, adapter)


def load(server: Server, adapter: Path) -> str:
    name = new_name()
    ask(server, "POST", "/load_lora_adapter", {"lora_name": name, "lora_path": str(adapter)})
    return name


def new_name() -> str:
    return f"adapter-{next(_serial)}"


def unload(server: Server, name: str, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.post("/unload_lora_adapter", {"lora_name": name, **fields})
    return answer


def loaded(server: Server) -> set[str]:
    """Return the adapter names known to the server."""
    return {m["id"] for m in ask(server, "GET", "/v1/models")["data"] if m.get("parent")}


def unloadings(server: Server) -> int:
    return server.log_text().count("LoRA adapter unloading completes")


@on("overlap", "workers")
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_unload_is_refused_while_paused_requests_use_the_adapter(
    server: Server, adapter: Path, name: str, mode: str
) -> None:
    running = start_running(server, 2, tokens=ENDLESS, lora_path=name)
    pause(server, mode)
    answer = unload(server, name)
    assert answer["status_code"] == 409, answer
    assert f"'{name}'" in answer["message"]
    assert "2 paused requests" in answer["message"]
    # the refused call delays no other, and the adapter stays loaded
    assert unload(server, load(server, adapter))["success"]
    running += start(server, 1, tokens=ENDLESS, lora_path=name)
    resume(server)
    expect_all_go_on(running)
    assert unload(server, name)["success"]


@on("overlap", "workers")
def test_pause_ends_a_waiting_unload(server: Server, adapter: Path, name: str) -> None:
    """SGLang's unload waits for the adapter's requests, which a pause keeps from ending."""
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


@on("overlap", "normal", "workers")
def test_non_blocking_unload_removes_the_name_before_paused_requests_end(
    server: Server, name: str
) -> None:
    """The last request's end unloads the adapter."""
    running = start_running(server, 2, tokens=ENDLESS, lora_path=name)
    before = unloadings(server)
    pause(server, "in_place")
    assert unload(server, name, non_blocking=True)["success"]
    assert name not in loaded(server)
    late = server.post("/generate", {"input_ids": prompt(), "lora_path": name})
    assert late["status_code"] == 400, late
    assert unload(server, name, non_blocking=True)["status_code"] == 404
    assert unloadings(server) == before
    resume(server)
    expect_all_go_on(running)
    until("it is unloaded", lambda: unloadings(server) == before + 1)


@on("overlap")
def test_unused_adapter_can_be_unloaded_in_a_pause(server: Server, name: str) -> None:
    running = start_running(server, 1, tokens=ENDLESS)
    pause(server, "in_place")
    assert unload(server, name)["success"]
    resume(server)
    expect_all_go_on(running)


@on("overlap")
@pytest.mark.parametrize("keep", ["host", "discard"])
def test_adapters_and_profiles_work_while_memory_is_released(
    server: Server, folders: list[Path], name: str, tmp_path: Path, keep: str
) -> None:
    """These calls read no weights."""
    policy, other = Policy(server, None), Policy(server, folders)
    policy.load(0)
    running = policy.start(2)
    pause(server, "retract")
    release(server, keep_weights=keep)
    assert unload(server, name)["success"]
    other.load(2)
    assert policy.load(1, replace=True, running="move")["moved"] == 2
    profile = {"output_dir": str(tmp_path), "activities": ["CPU"]}
    for path, body in (("/start_profile", profile), ("/stop_profile", None)):
        answer = server.post(path, body)
        assert answer["status_code"] == 200, answer
    assert list(tmp_path.iterdir())
    resume_memory(server)
    if keep == "discard":
        model = lora.build_model(tmp_path / "model")
        whole = {"model_path": str(model), "weight_version": "v0", "partial": False}
        ask(server, "POST", "/update_weights_from_disk", whole)
    resume(server)
    later = other.start(1)
    other.expect_all(later, 2)
    policy.expect_all(running, 0, 1)


# ---- a name passes to another adapter ----------------------------------------------------


class Policy:
    """A name and its adapters over time: numbers to versions."""

    def __init__(self, server: Server, folders: list[Path] | None, *, ranks: int = 1) -> None:
        """Take adapters from ``folders``, or send tensors if that is None."""
        self.name = new_name()
        self.versions: dict[int, str] = {}
        self._server = server
        self._folders = folders
        self._ranks = ranks

    def load(self, number: int, **fields: Any) -> dict[str, Any]:
        answer = self.try_to_load(number, adapter_version=f"step {number}", **fields)
        assert answer["status_code"] == 200, answer
        assert (answer["lora_name"], answer["success"]) == (self.name, True)
        self.versions[number] = answer["adapter_version"]
        return answer

    def try_to_load(self, number: int, **fields: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"lora_name": self.name, **fields}
        path = "/load_lora_adapter"
        if self._folders is not None:
            body["lora_path"] = str(self._folders[number])
        else:
            path += "_from_tensors"
            body |= lora.tensor_body(lora.tensors(number), ranks=self._ranks)
        answer: dict[str, Any] = self._server.post(path, body)
        return answer

    def start(self, n: int, /, **request: Any) -> list[Generation]:
        request = {"tokens": ENDLESS, **request}
        return start_running(self._server, n, lora_path=self.name, **request)

    def expect(self, output: Output, *numbers: int) -> None:
        """Check that these adapters made the tokens, in order, and that the spans say so."""
        told = lora.spans_by_tokens(output.tokens, self.name, self.versions)
        assert output.meta["adapter_versions"] == told
        assert [span["version"] for span in told] == [self.versions[n] for n in numbers]
        assert labels_of(output.meta["weight_versions"]) == ["v0"] * len(output.tokens)

    def expect_all(self, generations: list[Generation], *numbers: int) -> list[Output]:
        """Check that all requests continue, then abort them and check their spans."""
        more_tokens(generations)
        outputs = []
        for generation in generations:
            generation.abort()
            outputs.append(generation.output())
            self.expect(outputs[-1], *numbers)
        return outputs


@on("overlap", "normal", "workers")
@pytest.mark.parametrize(
    ("source", "mode"), [("folders", None), ("folders", "retract"), ("tensors", "in_place")]
)
def test_replace_lets_running_requests_finish_on_the_old_adapter(
    server: Server, folders: list[Path], source: str, mode: str | None
) -> None:
    policy = Policy(server, folders if source == "folders" else None)
    policy.load(0)
    running = policy.start(2)
    before = unloadings(server)
    if mode is not None:
        pause(server, mode)
    answer = policy.load(1, replace=True)
    assert loaded(server) == set(answer["loaded_adapters"]) == {policy.name}
    later = start(server, 1, tokens=ENDLESS, lora_path=policy.name)
    resume(server)
    assert unloadings(server) == before
    policy.expect_all(running, 0)
    until("the old one is unloaded", lambda: unloadings(server) == before + 1)
    policy.expect_all(later, 1)


@on("overlap", "normal", "workers")
@pytest.mark.parametrize("kv_cache", ["recompute", "fence"])
@pytest.mark.parametrize("mode", [None, "in_place", "retract"])
def test_replace_with_move_switches_running_requests(
    server: Server, kv_cache: str, mode: str | None
) -> None:
    """The old adapter is unloaded while they run."""
    policy = Policy(server, None)
    policy.load(0)
    shared = prompt()
    running = policy.start(1) + policy.start(1, input_ids=shared)
    (twice,) = policy.start(1, n=2)
    plain = start_running(server, 1, tokens=ENDLESS)
    before = unloadings(server)
    if mode is not None:
        pause(server, mode)
        settle(server, running)
    answer = policy.load(1, replace=True, running="move", kv_cache=kv_cache)
    assert answer["moved"] == 4
    had = twice.count
    sent_back = kv_cache == "recompute" and mode != "retract"
    assert answer["retracted"] == (5 if sent_back else 0)
    resume(server)
    until("the old one is unloaded", lambda: unloadings(server) == before + 1)
    # the moved requests are counted as users of the new adapter
    pause(server, "in_place")
    assert "4 paused requests" in unload(server, policy.name)["message"]
    resume(server)
    *_, last = policy.expect_all(running, 0, 1)
    assert last.meta["num_retractions"] == (1 if sent_back or mode == "retract" else 0)
    (output,) = expect_all_go_on(plain)
    assert "adapter_versions" not in output.meta
    twice.wait_for_tokens(had)
    ask(server, "POST", "/abort_request", {"abort_all": True})
    for output in twice.outputs():
        policy.expect(output, 0, 1)
    # KV by two adapters is reused by no request; KV by one adapter is
    (again,) = policy.start(1, input_ids=shared, tokens=4)
    cached = again.output().meta["cached_tokens"]
    kept = kv_cache == "fence" and mode != "retract"
    assert cached == (0 if kept else len(shared) - 1)
    policy.expect(again.output(), 1)


@on("overlap", "workers")
def test_replace_with_move_switches_waiting_requests(server: Server) -> None:
    """An aborted request in the queue keeps the versions of its tokens."""
    policy = Policy(server, None)
    policy.load(0)
    (running,) = policy.start(1)
    pause(server, "retract")
    (had,) = settle(server, [running])
    (fresh,) = start(server, 1, tokens=3, lora_path=policy.name)
    until("both wait", lambda: status(server)["waiting"] == 2)
    assert policy.load(1, replace=True, running="move")["moved"] == 2
    running.abort()
    output = running.output()
    assert len(output.tokens) == had
    policy.expect(output, 0)
    resume(server)
    policy.expect(fresh.output(), 1)


@on("overlap", "workers")
def test_replace_with_move_switches_samples_not_yet_created(server: Server) -> None:
    """SGLang has looked up their adapter, and creates them once their prompt is computed."""
    policy = Policy(server, None)
    policy.load(0)
    before = unloadings(server)
    pause(server, "in_place")
    (twice,) = start(server, 1, tokens=ENDLESS, lora_path=policy.name, n=2)
    until("their prompt waits", lambda: status(server)["waiting"] == 1)
    assert policy.load(1, replace=True, running="move", kv_cache="fence")["moved"] == 1
    assert unloadings(server) == before
    resume(server)
    until("the old one is unloaded", lambda: unloadings(server) == before + 1)
    twice.wait_for_tokens(twice.count + 1)
    ask(server, "POST", "/abort_request", {"abort_all": True})
    for output in twice.outputs():
        assert output.tokens[-1] == lora.token(1)
        told = lora.spans_by_tokens(output.tokens, policy.name, policy.versions)
        assert output.meta["adapter_versions"] == told


@on("overlap", "normal", "workers")
def test_unusable_adapter_is_refused_at_its_load(server: Server, name: str) -> None:
    """Otherwise its first request would end SGLang."""
    running = start_running(server, 2, tokens=ENDLESS, lora_path=name)
    good = lora.tensors(0)
    down, up = good
    for wrong, config, why in (
        ({**good, down: good[down][:, :-1].clone()}, {}, down),
        ({**good, up: good[up][:-1].clone()}, {}, up),
        ({**good, up: good[up][0].clone()}, {}, up),
        ({down: good[down]}, {}, down),
        ({up: good[up]}, {}, up),
        ({}, {}, "no tensor"),
        (lora.tensors(0, module="none"), {}, "none"),
        (lora.tensors(0, module="q_proj"), {}, "v_proj"),
        (good, {"target_modules": ["q_proj"]}, "--lora-target-modules"),
        (good, {"r": 2 * RANK}, "--max-lora-rank"),
    ):
        for fields in ({"lora_name": name, "replace": True}, {"lora_name": new_name()}):
            body = lora.tensor_body(wrong, **config) | fields
            refused = server.post("/load_lora_adapter_from_tensors", body)
            assert refused["status_code"] == 400, (why, refused)
            assert why in refused["message"], refused
            assert refused["error_message"] == refused["message"]
            assert loaded(server) == {name}
    expect_all_go_on(running)


def _filled(weights: lora.Weights, part: str, value: float, dtype: torch.dtype) -> lora.Weights:
    return {
        name: torch.full_like(tensor, value, dtype=dtype) if part in name else tensor
        for name, tensor in weights.items()
    }


LOADS = ("/load_lora_adapter", "/load_lora_adapter_from_tensors", "/v1/load_lora_adapter")


def try_every_load(
    server: Server, name: str, folder: Path, weights: lora.Weights, **config: Any
) -> list[str]:
    """Try to load an adapter in each way, new and over ``name``; return why each is refused."""
    lora.write(folder, weights, **config)
    path, tensors = {"lora_path": str(folder)}, lora.tensor_body(weights, **config)
    move = {"lora_name": name, "replace": True, "running": "move"}
    refused = []
    for route, content in zip(LOADS, (path, tensors, path), strict=True):
        for fields in ({"lora_name": new_name()}, move):
            answer = server.post(route, {**content, **fields})
            if answer["status_code"] == 404 and route not in LOADS[:2]:
                continue
            assert answer["status_code"] == 400, (route, fields, answer)
            refused.append(answer["error"]["message"] if "error" in answer else answer["message"])
    return refused


@on("overlap", "workers")
@pytest.mark.guards_fix
def test_adapter_with_infinite_values_is_refused(server: Server, name: str, tmp_path: Path) -> None:
    """Its first sampled request would end the server, with all other requests."""
    running = start_running(server, 2, tokens=ENDLESS, lora_path=name)
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    for part, value, dtype in (
        ("lora_A", float("nan"), half),
        ("lora_B", float("inf"), half),
        ("lora_B", 3.4e38, single),
        ("lora_A", -1e300, double),
        # finite, but activations would not be
        ("lora_A", 1e30, half),
        ("lora_B", 1e30, half),
    ):
        wrong = _filled(lora.tensors(1), part, value, dtype)
        for why in try_every_load(server, name, tmp_path / "wrong", wrong):
            assert f"{part}.weight'" in why
    for alpha in (1e38, -1e38, "8", None):
        for why in try_every_load(
            server, name, tmp_path / "wrong", lora.tensors(1), lora_alpha=alpha
        ):
            assert "lora_alpha" in why
    # JSON has no such numbers, but Python reads them
    for alpha in (float("inf"), float("nan")):
        lora.write(tmp_path / "wrong", lora.tensors(1), lora_alpha=alpha)
        body = {"lora_name": new_name(), "lora_path": str(tmp_path / "wrong")}
        refused = server.post("/load_lora_adapter", body)
        assert refused["status_code"] == 400, refused
        assert "lora_alpha" in refused["message"]
    assert loaded(server) == {name}
    expect_all_go_on(running)


@on("overlap", "workers")
@pytest.mark.guards_fix
def test_tensor_that_reaches_no_weight_is_refused(
    server: Server, name: str, tmp_path: Path
) -> None:
    """A tower's layer of equal shape would take the place of the language model's layer."""
    good = lora.tensors(1)
    for path in (
        "base_model.model.lm_head",
        "base_model.model.model.embed_tokens",
        "base_model.model.model.norm",
        "base_model.model.model.multi_modal_projector.linear_1",
        "base_model.model.vision_tower.encoder.layers.0.self_attn.o_proj",
        "base_model.model.model.visual.layers.0.self_attn.o_proj",
        "base_model.model.model.mtp.layers.0.self_attn.o_proj",
        "base_model.model.model.layers.0.self_attn.out_prj",
        "base_model.model.model.layers.0.self_atn.o_proj",
        "base_model.model.model.layers.0.mlp.down_proj",
        "base_model.model.model.layres.0.self_attn.o_proj",
        "base_model.model.model.layers.99.self_attn.o_proj",
        # twice the same module
        "model.layers.0.self_attn.o_proj",
    ):
        parts = ("lora_A.weight", "lora_B.weight")
        stray = {
            f"{path}.{part}": each.clone() for part, each in zip(parts, good.values(), strict=True)
        }
        for why in try_every_load(server, name, tmp_path / "wrong", {**good, **stray}):
            assert f"{path}.lora_" in why
    down, _ = good
    for end in ("base_layer.bias", "lora_B.bias", "lora_magnitude_vector", "base_layer.weight"):
        stray = {down.replace("lora_A.weight", end): torch.ones(4)}
        for why in try_every_load(server, name, tmp_path / "wrong", {**good, **stray}):
            assert f".{end}'" in why
    policy = Policy(server, None)
    policy.load(1)
    policy.expect_all(policy.start(1), 1)


@on("overlap")
def test_field_that_sglang_ignores_is_refused_by_its_name(
    server: Server, name: str, tmp_path: Path
) -> None:
    for field, value in (("bias", "all"), ("alpha_pattern", {"o_proj": 32}), ("unheard_of", 1)):
        for why in try_every_load(
            server, name, tmp_path / "wrong", lora.tensors(1), **{field: value}
        ):
            assert f"{field}=" in why
    for why in try_every_load(
        server, name, tmp_path / "wrong", lora.tensors(1), layers_to_transform=[1]
    ):
        assert "layers_to_transform" in why
        assert "layers.0.self_attn.o_proj.lora_A.weight'" in why


@on("overlap")
@pytest.mark.guards_fix
def test_rank_stabilized_adapter_has_its_strength(server: Server, tmp_path: Path) -> None:
    """PEFT divides by the root of the rank, 4 here."""

    def logprobs(**config: Any) -> list[float]:
        adapter = load(server, lora.write(tmp_path / "one", lora.tensors(1), **config))
        body = {
            "input_ids": [5, 6, 7],
            "lora_path": adapter,
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 3, "temperature": 0},
        }
        answer = ask(server, "POST", "/generate", body)
        return [each[0] for each in answer["meta_info"]["output_token_logprobs"]]

    stabilized = logprobs(use_rslora=True, lora_alpha=0.2)
    assert stabilized == logprobs(lora_alpha=0.4)
    assert stabilized != logprobs(lora_alpha=0.2)


# written by PEFT 0.19 for ``LoraConfig(r=4, target_modules=["o_proj"])``
PEFT: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None,
    "auto_mapping": None, "base_model_name_or_path": "Qwen/Qwen3-0.6B", "bias": "none",
    "corda_config": None, "ensure_weight_tying": False, "eva_config": None,
    "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None,
    "layers_pattern": None, "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 8,
    "lora_bias": False, "lora_dropout": 0.05, "lora_ga_config": None, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "monteclora_config": None,
    "peft_type": "LORA", "peft_version": "0.19.1", "qalora_group_size": 16, "r": 4,
    "rank_pattern": {}, "revision": None, "target_modules": ["o_proj"],
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None,
    "use_bdlora": None, "use_dora": False, "use_qalora": False, "use_rslora": False,
    "velora_config": None,
}  # fmt: skip


@on("overlap")
@pytest.mark.parametrize(
    "field",
    [
        {},
        {"lora_alpha": 8.0, "init_lora_weights": "gaussian"},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"alpha_pattern": {"o_proj": 8}, "rank_pattern": {"o_proj": 4}},
        {"exclude_modules": ".*visual.*", "runtime_config": {"ephemeral_gpu_offload": False}},
        {"modules_to_save": [], "target_parameters": [], "use_rslora": None},
    ],
)
def test_adapter_as_peft_writes_it_is_served(
    server: Server, tmp_path: Path, field: dict[str, Any]
) -> None:
    folder = lora.write(tmp_path / "peft", lora.tensors(1), **PEFT | field)
    for names in ("base_model.model.model.layers", "model.layers", "model.language_model.layers"):
        renamed = {
            name.replace("base_model.model.model.layers", names): tensor
            for name, tensor in lora.tensors(1).items()
        }
        lora.write(folder, renamed, **PEFT | field)
        adapter = load(server, folder)
        (request,) = start(server, 1, tokens=3, lora_path=adapter)
        assert request.output().tokens == [lora.token(1)] * 3


@on("overlap", "normal", "workers")
def test_load_of_a_taken_name_without_replace_is_refused(
    server: Server, name: str, folders: list[Path]
) -> None:
    """Contradictory fields are refused too."""
    policy = Policy(server, None)
    policy.load(0)
    for _ in range(2):
        refused = policy.try_to_load(1)
        assert refused["status_code"] == 400, refused
        assert "already loaded" in refused["error_message"]
        policy.load(0, replace=True)
    for fields, why in (
        ({"running": "move"}, "replace"),
        ({"replace": True, "kv_cache": "fence"}, "move"),
        ({"replace": True, "running": "fly"}, "running"),
        ({"adapter_version": "a\nb"}, "printable"),
    ):
        refused = policy.try_to_load(1, **fields)
        assert refused["status_code"] == 400, refused
        assert why in refused["message"]
    policy.expect_all(policy.start(1), 0)


@on("overlap")
def test_unnamed_adapter_versions_count_upwards(server: Server) -> None:
    policy = Policy(server, None)
    answers = [policy.try_to_load(n, replace=True) for n in (0, 1)]
    first, second = (int(answer["adapter_version"]) for answer in answers)
    assert first < second
    policy.versions[1] = str(second)
    policy.expect_all(policy.start(1), 1)


@on("normal", "workers")
def test_replace_is_refused_without_room_for_another_adapter(
    server: Server, folders: list[Path]
) -> None:
    """Replaced adapters in use count as loaded, and none is unloaded to make room."""
    policies = [Policy(server, folders) for _ in range(MAX_LOADED - 1)]
    for policy in policies:
        policy.load(0)
    running = policies[0].start(1)
    policies[0].load(1, replace=True)
    refused = policies[1].try_to_load(1, replace=True)
    assert refused["status_code"] == 409, refused
    assert f"--max-loaded-loras is {MAX_LOADED}" in refused["message"]
    assert loaded(server) == {policy.name for policy in policies}
    policies[1].expect_all(policies[1].start(1), 0)
    policies[0].expect_all(running, 0)
    until(
        "there is room again",
        lambda: policies[1].try_to_load(1, replace=True)["status_code"] == 200,
    )


@on("normal", "workers")
def test_load_in_a_pause_is_refused_without_room(server: Server, folders: list[Path]) -> None:
    """SGLang would unload an adapter and wait for its requests, which cannot end."""
    policies = [Policy(server, folders) for _ in range(MAX_LOADED)]
    running = []
    for policy in policies[:-1]:
        policy.load(0)
        running += policy.start(1)
    policies[-1].load(0)
    pause(server, "in_place")
    refused = Policy(server, folders).try_to_load(1)
    assert refused["status_code"] == 400, refused
    assert "1 paused request" in refused["message"]
    assert loaded(server) == {policy.name for policy in policies}
    resume(server)
    for policy, generation in zip(policies, running, strict=False):
        policy.expect_all([generation], 0)


@on("normal", "workers")
def test_evicted_adapter_keeps_its_version_when_reloaded(
    server: Server, folders: list[Path]
) -> None:
    """SGLang evicts the least recently used adapter and reloads one on demand."""
    policies = [Policy(server, folders) for _ in range(MAX_LOADED + 1)]
    for policy in policies:
        policy.load(0)
    first, second, third, last = policies
    assert loaded(server) == {second.name, third.name, last.name}
    second.expect_all(second.start(1), 0)
    first.expect_all(first.start(1), 0)
    assert loaded(server) == {second.name, last.name, first.name}


@on("normal", "workers")
@pytest.mark.guards_fix
def test_evicted_adapter_is_refused_with_other_files(server: Server, tmp_path: Path) -> None:
    """Its requests would get the new files' tokens under the old version."""
    folders = [lora.write(tmp_path / str(number), lora.tensors(number)) for number in range(2)]
    first, *others = policies = [Policy(server, folders) for _ in range(MAX_LOADED + 1)]
    for policy in policies:
        policy.load(0)
    assert loaded(server) == {policy.name for policy in others}
    new, path = lora.tensors(2), folders[0] / "adapter_model.safetensors"
    whole = path.read_bytes()
    contracts: tuple[dict[str, Any], ...] = ({}, {"exact_adapter_version": "step 0"})
    for contract in contracts:
        lora.write(folders[0], new)
        body = {"input_ids": prompt(), "lora_path": first.name, **contract}
        refused = server.post("/generate", body)
        assert refused["status_code"] == 400, refused
        assert "'step 0'" in refused["error"]["message"]
        # half written
        path.write_bytes(whole[:-8])
        refused = server.post("/generate", body)
        assert refused["status_code"] == 400, refused
        path.write_bytes(whole)
        first.expect_all(first.start(1, **contract), 0)
        for policy in others:
            policy.expect_all(policy.start(1), 0)
    # a load by its caller is a version of its own
    lora.write(folders[1], new)
    body = {"lora_name": first.name, "lora_path": str(folders[1]), "adapter_version": "step 1"}
    assert server.post("/load_lora_adapter", body)["status_code"] == 200
    first.versions[2] = "step 1"
    first.expect_all(first.start(1), 2)


@on("overlap", "normal")
@pytest.mark.guards_fix
def test_loaded_adapter_is_not_its_file(server: Server, tmp_path: Path) -> None:
    """SGLang maps the file: it would serve the bytes written later, and end with a cut file."""
    folder = lora.write(tmp_path / "adapter", lora.tensors(0))
    policy = Policy(server, [folder])
    policy.load(0)
    path = folder / "adapter_model.safetensors"
    later = lora.write(tmp_path / "later", lora.tensors(1)) / "adapter_model.safetensors"
    with path.open("r+b") as file:
        file.write(later.read_bytes())
    policy.expect_all(policy.start(1), 0)
    adapter = lora.write(tmp_path / "adapter", lora.tensors(0))
    other = Policy(server, [adapter])
    other.load(0)
    os.truncate(path, 8)
    other.expect_all(other.start(1), 0)


@on("normal", "workers")
@pytest.mark.guards_fix
def test_load_puts_out_no_adapter_that_came_as_tensors(server: Server, folders: list[Path]) -> None:
    """Nobody could load it again. An adapter from a folder makes room, also if used last."""
    sent = [Policy(server, None) for _ in range(MAX_LOADED - 1)]
    for policy in sent:
        policy.load(0)
    kept, *more = (Policy(server, folders) for _ in range(3))
    for policy in (kept, *more):
        policy.load(1)
        policy.expect_all(policy.start(1), 1)
    assert loaded(server) == {policy.name for policy in (*sent, more[-1])}
    last = Policy(server, None)
    last.load(1)
    for policy in (Policy(server, None), Policy(server, folders)):
        refused = policy.try_to_load(1)
        assert refused["status_code"] == 400, refused
        for each in (*sent, last):
            assert repr(each.name) in refused["message"]
    refused = server.post("/generate", {"input_ids": prompt(), "lora_path": kept.name})
    assert refused["status_code"] == 400, refused
    assert "came as tensors" in refused["error"]["message"]
    for policy in sent:
        policy.expect_all(policy.start(1), 0)
    assert unload(server, last.name)["success"]
    kept.expect_all(kept.start(1), 1)


# ---- several workers ---------------------------------------------------------------------


@on("workers")
def test_adapter_loaded_by_one_worker_is_known_to_all(server: Server) -> None:
    policy = Policy(server, None)
    with contextlib.ExitStack() as stack:
        one, other = via_workers = [
            stack.enter_context(via_worker(server, each)) for each in workers(server)
        ]
        for number, (loads, uses) in enumerate(zip(via_workers, (other, one), strict=True)):
            body = lora.tensor_body(lora.tensors(number))
            body |= {"lora_name": policy.name, "replace": True}
            path = "/load_lora_adapter_from_tensors"
            version = ask(loads, "POST", path, body)["adapter_version"]
            for each in via_workers:
                assert loaded(each) == {policy.name}
            policy.versions[number] = version
            (running,) = start_running(uses, 1, tokens=3, lora_path=policy.name)
            policy.expect(running.output(), number)
        assert unload(one, policy.name, non_blocking=True)["success"]
        for each in via_workers:
            refused = each.post("/generate", {"input_ids": [1], "lora_path": policy.name})
            assert refused["status_code"] == 400, refused
            assert "never been loaded" in refused["error"]["message"]


@on("workers")
def test_adapter_names_beyond_64_kib_reach_every_worker(server: Server, adapter: Path) -> None:
    """asyncio reads lines of at most 64 KiB by default."""
    names = {f"{new_name()}-{'x' * 50_000}" for _ in range(2)}
    for name in names:
        body = {"lora_name": name, "lora_path": str(adapter)}
        ask(server, "POST", "/load_lora_adapter", body)
    for worker in workers(server):
        with via_worker(server, worker) as one:
            assert loaded(one) == names
    (running,) = start_running(server, 1, tokens=ENDLESS, lora_path=min(names))
    pause(server, "in_place")
    assert "1 paused request" in unload(server, min(names))["message"]
    resume(server)
    expect_all_go_on([running])


@on("normal", "workers")
def test_request_of_an_unloaded_adapter_reloads_a_folder_and_refuses_tensors(
    server: Server, folders: list[Path]
) -> None:
    policy = Policy(server, None)
    policy.load(0)
    assert unload(server, policy.name)["success"]
    refused = server.post("/generate", {"input_ids": prompt(), "lora_path": policy.name})
    assert refused["status_code"] == 400, refused
    assert "implicitly load" in refused["error"]["message"]
    policy = Policy(server, folders)
    policy.load(0)
    assert unload(server, policy.name)["success"]
    policy.expect_all(policy.start(1), 0)


@on("workers")
def test_load_survives_the_death_of_its_worker(server: Server) -> None:
    """The load is carried through without a caller."""
    policy = Policy(server, None)
    first, second = workers(server)
    (rank,) = schedulers(server.process.pid)
    begun = f"Start load Lora adapter from tensors. Lora name={policy.name}"
    with (
        via_worker(server, first) as one,
        via_worker(server, second) as other,
        ThreadPoolExecutor() as threads,
    ):
        rank.suspend()
        body = {"lora_name": policy.name, **lora.tensor_body(lora.tensors(0))}
        loading = threads.submit(one.post, "/load_lora_adapter_from_tensors", body)
        until("it is begun", lambda: begun in server.log_text())
        first.kill()
        with pytest.raises(httpx.TransportError):
            loading.result()
        rank.resume()
        until("the other worker finds it", lambda: loaded(other) == {policy.name})
    until("there are two again", lambda: len(workers(server)) == 2)


@on("workers")
def test_requests_of_a_dead_worker_keep_their_adapter_loaded(server: Server) -> None:
    """The requests run on, known to the ranks alone."""
    policy = Policy(server, None)
    policy.load(0)
    first, _ = workers(server)
    with via_worker(server, first) as one:
        start_running(one, 1, tokens=ENDLESS, lora_path=policy.name)
        first.kill()
    until("there are two again", lambda: len(workers(server)) == 2)
    pause(server, "in_place")
    refused = unload(server, policy.name)
    assert refused["status_code"] == 400, refused
    assert "1 requests of it have not ended" in refused["error_message"]
    resume(server)
    with ThreadPoolExecutor() as threads:
        before = unloadings(server)
        unloading = threads.submit(unload, server, policy.name)
        start_running(server, 1, tokens=ENDLESS)
        assert not unloading.done()
        assert unloadings(server) == before
        ask(server, "POST", "/abort_request", {"abort_all": True})
        assert unloading.result()["success"]
    assert unloadings(server) == before + 1


# ---- two ranks ---------------------------------------------------------------------------


@on("tp2")
@pytest.mark.parametrize("kv_cache", ["recompute", "fence"])
def test_replace_with_move_switches_requests_on_both_ranks(server: Server, kv_cache: str) -> None:
    policy = Policy(server, None, ranks=2)
    policy.load(0)
    running = policy.start(2)
    assert policy.load(1, replace=True, running="move", kv_cache=kv_cache)["moved"] == 2
    policy.expect_all(running, 0, 1)


@on("tp2")
def test_bad_shape_on_one_rank_unloads_the_adapter_on_the_other(server: Server) -> None:
    policy = Policy(server, None, ranks=2)
    policy.load(0)
    good = lora.tensors(1)
    down = next(iter(good))
    wrong = {**good, down: good[down][:, :-1].clone()}
    body = lora.tensor_body(wrong, ranks=2) | {"lora_name": "half", "adapter_version": "step 1"}
    for _ in range(2):
        refused = server.post("/load_lora_adapter_from_tensors", body)
        assert refused["status_code"] == 400, refused
        assert f"{down!r}" in refused["message"]
    body |= lora.tensor_body(good, ranks=2)
    assert server.post("/load_lora_adapter_from_tensors", body)["status_code"] == 200
    policy.expect_all(policy.start(1), 0)


# ---- Engine ------------------------------------------------------------------------------


def test_engine_replaces_adapters_of_running_requests(pool: ServerPool, tmp_path: Path) -> None:
    pool.discard()
    model = lora.build_model(tmp_path / "model")
    answers = run_script("tests.support.engine_adapters", model, tmp_path)
    assert answers["refused"] == [False, True]
    of_tensor, of_alpha = answers["faults"]
    assert "o_proj.lora_A.weight' holds NaN or infinity" in of_tensor
    assert "lora_alpha=nan" in of_alpha
    for way in ("move", "async"):
        output = answers[way]
        told = lora.spans_by_tokens(output["tokens"], "policy", {0: "a", 1: "b", 2: "c"})
        assert output["spans"] == told
    assert [span["version"] for span in answers["move"]["spans"]] == ["a", "b"]
    assert [span["version"] for span in answers["async"]["spans"]] == ["c"]
    assert answers["unloaded"] == [True, False]


@on("overlap", "tp2")
def test_request_with_an_adapter_keeps_its_pinned_weights(
    server: Server, adapter: Path, checkpoints: Path
) -> None:
    """The adapter changes no token, so tokens name the weights."""
    name, before = load(server, adapter), status(server)["weight_version"]
    pinned = {"custom_params": {"weight_version": before}}
    bound = start_running(server, 2, tokens=ENDLESS, lora_path=name, sampling=pinned)
    free = start_running(server, 2, tokens=ENDLESS, lora_path=name)
    base = start_running(server, 1, tokens=ENDLESS)
    body = {"model_path": str(checkpoints / "v1"), "weight_version": "v1", "non_blocking": True}
    ask(server, "POST", "/update_weights_from_disk", body)
    more_tokens([*bound, *free, *base])
    for output in expect_all_go_on(bound):
        assert set(output.tokens) == {marker.token(0)}
        assert [s["version"] for s in output.meta["weight_versions"]] == [before]
        assert [s["adapter"] for s in output.meta["adapter_versions"]] == [name]
    for output in expect_all_go_on([*free, *base]):
        assert set(output.tokens) == {marker.token(0), marker.token(1)}
    ask(server, "POST", "/inflight/rollback", {})


# ---- vLLM's trainers load an adapter again by its name -----------------------------------

OWN = marker.token(0)
# the first token among equal logits
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


@on("overlap", "workers")
@pytest.mark.parametrize("path", LOAD)
@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_vllm_load_replaces_an_adapter_of_the_same_name(
    server: Server, adapter: Path, other_adapter: Path, path: str, paused: bool
) -> None:
    """Running requests keep their adapter, and the load does not wait for them."""
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


@on("overlap")
def test_vllm_load_of_an_unfit_adapter_keeps_the_old_one(
    server: Server, name: str, tmp_path: Path
) -> None:
    large = lora.write(tmp_path / "large", lora.uniform(-10.0, rank=2 * RANK), r=2 * RANK)
    body = {"lora_name": name, "lora_path": str(large)}
    refused = server.post("/skyrl/v1/load_lora_adapter", body)
    assert refused["status_code"] == 400, refused
    assert "rank" in refused["error"]["message"]
    assert tokens_of(server, name) == [OWN] * 3
    assert unload(server, name)["success"]


@on("overlap")
def test_server_info_tells_trl_the_lora_config(server: Server) -> None:
    config = server.get("/server_info?config_format=json")["vllm_config"]
    assert config["lora_config"] == {"max_lora_rank": RANK, "max_loras": 4, "max_cpu_loras": None}


# ---- an adapter's name as a model's ------------------------------------------------------

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAMPLING = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    if path == COMPLETIONS:
        return {"prompt": prompt(), **SAMPLING, **fields}
    return {"messages": [{"role": "user", "content": "t5"}], **SAMPLING, **fields}


def words_of(server: Server, path: str, **fields: Any) -> list[str]:
    choice = ask(server, "POST", path, body_for(path, **fields))["choices"][0]
    text: str = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    return text.split()


@on("overlap", "workers")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_adapter_name_as_model_is_served_by_the_adapter(
    server: Server, folders: list[Path], path: str
) -> None:
    """The plain name and SGLang's ``model:adapter`` form both work; the model's own names mean no
    adapter.
    """
    served = ask(server, "GET", "/v1/models")["data"][0]["id"]
    for number, folder in enumerate(folders[:2]):
        body = {"lora_name": f"policy-v{number}", "lora_path": str(folder)}
        ask(server, "POST", "/load_lora_adapter", body)
    for number in range(2):
        name, said = f"policy-v{number}", [f"t{lora.token(number)}"] * 3
        for model in (name, f"{served}:{name}", f"default:{name}"):
            assert words_of(server, path, model=model) == said
        assert words_of(server, path, model=served, lora_path=name) == said
        # bench_serving sends both, as do vLLM clients with support for SGLang's field
        assert words_of(server, path, model=name, lora_path=name) == said
    for fields in ({}, {"model": served}, {"model": "default"}, {"model": ""}):
        assert words_of(server, path, **fields) == [f"t{OWN}"] * 3
    body = body_for(path, model="policy-v0", lora_path="policy-v1")
    refused = server.post(path, body)
    assert refused["status_code"] == 400, refused
    assert "'policy-v1'" in refused["error"]["message"]


@on("overlap", "workers")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_unknown_model_name_answers_404(server: Server, name: str, path: str) -> None:
    """The error has OpenAI's form, also for former adapters and checkpoints."""
    served = ask(server, "GET", "/v1/models")["data"][0]["id"]
    assert unload(server, name, non_blocking=True)["success"]
    for model in (name, f"{served}:{name}", "gpt-4", served + "x"):
        refused = server.post(path, body_for(path, model=model))
        assert refused["status_code"] == 404, refused
        error = refused["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert repr(model) in error["message"]
        assert repr(served) in error["message"] or name in model
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    with client, pytest.raises(openai.NotFoundError, match="'gpt-4' does not exist"):
        client.completions.create(model="gpt-4", prompt=prompt(), max_tokens=1)


@on("overlap")
def test_adapter_with_the_served_models_name_answers_for_it(
    server: Server, folders: list[Path]
) -> None:
    """prime-rl names its policy so."""
    served = ask(server, "GET", "/v1/models")["data"][0]["id"]
    body = {"lora_name": served, "lora_path": str(folders[1])}
    ask(server, "POST", "/load_lora_adapter", body)
    assert tokens_of(server, served) == [lora.token(1)] * 3
    for path in (COMPLETIONS, CHAT):
        assert words_of(server, path, model=served) == [f"t{lora.token(1)}"] * 3
        assert words_of(server, path) == [f"t{OWN}"] * 3


@on("overlap")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "t5"}),
        ("/v1/score", {"query": "t5", "items": ["t6"], "label_token_ids": [5]}),
    ],
)
def test_routes_without_adapter_support_refuse_adapter_names(
    server: Server, name: str, path: str, body: dict[str, Any]
) -> None:
    """SGLang would answer with the model's own weights."""
    refused = server.post(path, {"model": name, **body})
    assert refused["status_code"] == 400, refused
    assert f"'{name}' is an adapter" in refused["error"]["message"]


@on("overlap")
@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_route_serves_adapters(server: Server, folders: list[Path], stream: bool) -> None:
    load_as = {"lora_name": "claude", "lora_path": str(folders[0])}
    ask(server, "POST", "/load_lora_adapter", load_as)
    body = {"max_tokens": 3, "temperature": 0, "messages": [{"role": "user", "content": "t5"}]}
    answer = ask(server, "POST", "/v1/messages", {"model": "claude", **body})
    assert answer["content"][0]["text"].split()[0] == f"t{lora.token(0)}"
    refused = server.post("/v1/messages", {"model": "claude-9", **body, "stream": stream})
    assert refused["status_code"] == 400, refused
    assert "'claude-9' does not exist" in refused["error"]["message"]


@on("overlap")
def test_trl_rollouts_use_the_adapter_they_name(server: Server, folders: list[Path]) -> None:
    """TRL names each step's adapter differently, and requests of the previous step still run."""
    for step in range(2):
        name = f"trl-policy-v{step}"
        body = {"lora_name": name, "lora_path": str(folders[step]), "load_inplace": False}
        ask(server, "POST", "/v1/load_lora_adapter", body)
        for asked in range(step + 1):
            body = trl.rollout(f"trl-policy-v{asked}", prompt(), temperature=0.01, max_tokens=3)
            tokens, _ = trl.read_rollout(ask(server, "POST", COMPLETIONS, body))
            assert tokens == [lora.token(asked)] * 3
    ask(server, "POST", "/v1/unload_lora_adapter", {"lora_name": "trl-policy-v0"})
    assert server.post(COMPLETIONS, trl.rollout("trl-policy-v0", prompt()))["status_code"] == 404


@on("overlap", "workers")
def test_adapter_contract_waits_for_its_version(server: Server, folders: list[Path]) -> None:
    policy = Policy(server, folders)
    policy.load(0)

    def ask_for(stream: bool = True, **contract: Any) -> Generation:
        return Generation(server, tokens=3, stream=stream, lora_path=policy.name, **contract)

    refused = ask_for(exact_adapter_version="step 1", version_timeout_s=0)
    refused.wait_for_end()
    assert (refused.status, refused.count) == (503, 0)
    assert "step 0" in (refused.refusal or "")
    held = ask_for(exact_adapter_version="step 1")
    policy.load(1, replace=True)
    policy.expect(held.output(), 1)
    body = {"lora_name": policy.name, "lora_path": str(folders[2]), "replace": True}
    numbered = ask_for(min_adapter_version=7)
    ask(server, "POST", "/load_lora_adapter", {**body, "adapter_version": "07"})
    assert numbered.output().meta["adapter_versions"][0]["version"] == "07"


@on("overlap", "workers")
def test_move_gives_no_token_of_another_adapter_version(server: Server) -> None:
    policy = Policy(server, None)
    policy.load(0)
    (running,) = policy.start(1, exact_adapter_version="step 0")
    pause(server, "in_place")
    contract = {"exact_adapter_version": "step 0"}
    (bound,) = start(server, 1, tokens=3, lora_path=policy.name, **contract)
    until("it waits", lambda: status(server)["waiting"] == 1)
    assert policy.load(1, replace=True, running="move")["moved"] >= 1
    resume(server)
    output = bound.output()
    assert (output.tokens, output.meta["finish_reason"]["status_code"]) == ([], 503)
    policy.expect_all([running], 0, 1)
