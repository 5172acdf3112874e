"""vLLM's routes for RL, driven the way vLLM's own examples drive them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from harness import marker
from harness.server import PLAIN, Server, serve
from harness.trainer import Trainer
from tests.support.load import (
    ENDLESS,
    Generation,
    expect_aborted,
    expect_all_go_on,
    expect_whole,
    pause,
    prompt,
    resume,
    settle,
    start,
    start_running,
    status,
    until,
    until_waiting,
)
from tests.support.sparse import BAD, HEAD, changes_between, pair
from tests.support.updates import Weights, expect_served, expect_to_run_on, serving
from tests.support.vllm import BUCKET_BYTES, ROUTES, VLLMClient, update_info

pytest_plugins = ["tests.support.fixtures"]


def patch_info(sparse: Weights, **fields: Any) -> dict[str, Any]:
    """Return vLLM's ``update_info`` of sparse tensors of the marker model."""
    names = [name.removesuffix(".values") for name in sparse if name.endswith(".values")]
    values = [sparse[f"{name}.values"] for name in names]
    whole = marker.tensors(0)
    return {
        "names": names,
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in values],
        "shapes": [list(whole[name].shape) for name in names],
        "num_updates_list": [len(tensor) for tensor in values],
        **fields,
    }


# ---- weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("clear_cache", [True, False])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one_by_one"])
def test_training_steps_keep_running_requests(
    vllm_server: Server, vllm: VLLMClient, trainer: Trainer, packed: bool, clear_cache: bool
) -> None:
    """Each step pauses with ``keep``, sends, and resumes."""
    generations = start_running(vllm_server, 2, tokens=ENDLESS)
    vllm.init_weight_transfer_engine(trainer, packed=packed)
    for version in (1, 2):
        paused = vllm.post("/pause", mode="keep", clear_cache=clear_cache)
        assert paused["status"] == "paused"
        assert vllm.get("/is_paused") == {"is_paused": True}
        (rank,) = paused["ranks"]
        assert rank["retracted"] == (2 if clear_cache else 0)
        counts = settle(vllm_server, generations)
        vllm.send_weights(trainer, version, packed=packed, name=f"v{version}")
        assert vllm.get("/weight_info") == {"weight_version": f"v{version}"}
        assert settle(vllm_server, generations) == counts
        assert vllm.post("/resume")["status"] == "resumed"
        assert vllm.get("/is_paused") == {"is_paused": False}
        for generation, count in zip(generations, counts, strict=True):
            generation.wait_for_tokens(count + 3)
    expect_to_run_on(vllm_server, generations, [0, 1, 2])
    vllm.shutdown_weight_transfer_engine(trainer)


def test_update_without_a_pause_keeps_running_requests(
    vllm_server: Server, vllm: VLLMClient, trainer: Trainer
) -> None:
    generations = start_running(vllm_server, 2, tokens=ENDLESS)
    vllm.init_weight_transfer_engine(trainer, packed=True)
    vllm.send_weights(trainer, 1, packed=True, name="v1")
    expect_to_run_on(vllm_server, generations, [0, 1])
    # a returning trainer replaces its old group and drops its unfinished update
    vllm.post("/start_weight_update")
    trainer.order("leave", group="weight_update_group")
    assert trainer.answer() == "left"
    vllm.init_weight_transfer_engine(trainer, packed=False)
    vllm.send_weights(trainer, 2, packed=False)
    expect_served(vllm_server, 2)
    # vLLM changes the version's name only on request
    assert vllm.get("/weight_info") == {"weight_version": "v1"}
    vllm.shutdown_weight_transfer_engine(trainer)


def test_calls_out_of_order_are_refused(
    vllm_server: Server, vllm: VLLMClient, trainer: Trainer
) -> None:
    before = serving(vllm_server)
    vllm.refuse("/start_weight_update", "init_weight_transfer_engine")
    vllm.refuse("/update_weights", "init_weight_transfer_engine", json={"update_info": {}})
    vllm.refuse("/finish_weight_update", "no weight update")
    vllm.init_weight_transfer_engine(trainer, packed=False)
    vllm.refuse("/finish_weight_update", "no weight update")
    vllm.post("/start_weight_update")
    vllm.refuse("/start_weight_update", "already open", "init_weight_transfer_engine")
    # refused at once: the open update may belong to a dead trainer
    weight_dir = {"weight_dir": "/anywhere"}
    vllm.refuse("/update_weights", "finish_weight_update commits", status=409, json=weight_dir)
    vllm.refuse("/shutdown_weight_transfer_engine", "going on", status=409)
    vllm_server.post("/abort_weight_update", {})
    vllm.refuse("/finish_weight_update", "no weight update")
    vllm.refuse(
        "/update_weights", "start_weight_update", "join anew", json={"update_info": update_info(1)}
    )
    assert serving(vllm_server) == before
    vllm.shutdown_weight_transfer_engine(trainer)


@pytest.mark.parametrize("updates", [[], [patch_info({})]], ids=["no call", "no tensor"])
def test_update_of_nothing_is_a_version_of_the_same_weights(
    vllm_server: Server, vllm: VLLMClient, trainer: Trainer, updates: list[dict[str, Any]]
) -> None:
    vllm.init_weight_transfer_engine(trainer, packed=False)
    vllm.post("/start_weight_update")
    for info in updates:
        vllm.post("/update_weights", {"update_info": info})
    vllm.post("/finish_weight_update", {"weight_version": "v1"})
    assert vllm.get("/weight_info") == {"weight_version": "v1"}
    expect_served(vllm_server, 0)
    vllm.shutdown_weight_transfer_engine(trainer)


@pytest.mark.parametrize(
    ("info", "status", "words"),
    [
        ({"names": ["a"], "dtype_names": ["bfloat16"]}, 400, ("update_info", "`shapes`")),
        ({**update_info(1), "sizes": [1]}, 400, ("update_info", "`sizes`")),
        ({**update_info(1), "dtype_names": ["bfloat16"]}, 400, ("of one length",)),
        ({**update_info(1), "names": "lm_head.weight"}, 400, ("update_info", "`$.names`")),
        ([update_info(1)], 501, ("rank",)),
        ({**update_info(1), "ipc_handles_pickled": "gASV"}, 400, ("`ipc_handles_pickled`",)),
        (7, 400, ("`$.update_info`",)),
        ({**update_info(1), "num_updates_list": [1]}, 400, ("num_updates_list", "one length")),
        (
            {**patch_info(changes_between(0, 1)), "packed": True},
            400,
            ("num_updates_list", "packed"),
        ),
        (
            {**patch_info(changes_between(0, 1)), "num_updates_list": [-1]},
            400,
            ("`$.num_updates_list[0]`",),
        ),
    ],
)
def test_refused_update_drops_its_session(
    vllm_server: Server,
    vllm: VLLMClient,
    trainer: Trainer,
    info: Any,
    status: int,
    words: tuple[str, ...],
) -> None:
    generations = start_running(vllm_server, 1, tokens=ENDLESS)
    before = serving(vllm_server)
    vllm.init_weight_transfer_engine(trainer, packed=False)
    vllm.post("/start_weight_update")
    vllm.refuse("/update_weights", *words, "join anew", status=status, json={"update_info": info})
    vllm.refuse("/finish_weight_update", "no weight update")
    assert serving(vllm_server) == before
    expect_all_go_on(generations)
    vllm.shutdown_weight_transfer_engine(trainer)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one_by_one"])
def test_refused_tensor_keeps_the_group_usable(
    vllm_server: Server, vllm: VLLMClient, trainer: Trainer, packed: bool
) -> None:
    """The rank receives the remaining tensors, so the next update needs no new group."""
    before = serving(vllm_server)
    vllm.init_weight_transfer_engine(trainer, packed=packed)
    vllm.post("/start_weight_update")
    info = update_info(1)
    info["names"][4] = "nonsense"
    trainer.send(1, bucket=packed, bucket_bytes=BUCKET_BYTES if packed else None)
    vllm.refuse("/update_weights", "nonsense", json={"update_info": info})
    assert trainer.answer() == "sent"
    assert serving(vllm_server) == before
    vllm.send_weights(trainer, 2, packed=packed, name="v2")
    expect_served(vllm_server, 2)
    vllm.shutdown_weight_transfer_engine(trainer)


def test_sparse_patches_keep_running_requests(
    vllm_server: Server, vllm: VLLMClient, trainer: Trainer
) -> None:
    """vLLM 0.33's ``sparse_nccl`` backend broadcasts each tensor's indices and values."""
    generations = start_running(vllm_server, 2, tokens=ENDLESS)
    vllm.init_weight_transfer_engine(trainer, packed=False)
    for version in (1, 2):
        sparse = changes_between(version - 1, version)
        sparse |= pair("model.norm.weight", torch.empty(0, dtype=torch.int32), torch.empty(0))
        vllm.post("/start_weight_update")
        trainer.send_tensors(sparse)
        vllm.post("/update_weights", {"update_info": patch_info(sparse)})
        assert trainer.answer() == "sent"
        vllm.post("/finish_weight_update", {"weight_version": f"v{version}"})
    expect_to_run_on(vllm_server, generations, [0, 1, 2])
    vllm.shutdown_weight_transfer_engine(trainer)


@pytest.mark.parametrize(
    ("sent", "fields", "words"),
    [
        *((sent, {}, words) for sent, words in (BAD["out of range"], BAD["twice"], BAD["NaN"])),
        (changes_between(0, 1), {"shapes": [[64, 1024]]}, (HEAD, "[64, 1024]", "[1024, 64]")),
    ],
)
def test_bad_sparse_patch_changes_nothing(
    vllm_server: Server,
    vllm: VLLMClient,
    trainer: Trainer,
    sent: Weights,
    fields: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    generations = start_running(vllm_server, 1, tokens=ENDLESS)
    before = serving(vllm_server)
    vllm.init_weight_transfer_engine(trainer, packed=False)
    vllm.post("/start_weight_update")
    sent = {name: t.int() if name.endswith(".indices") else t for name, t in sent.items()}
    trainer.send_tensors(sent)
    vllm.refuse("/update_weights", *words, json={"update_info": patch_info(sent, **fields)})
    assert trainer.answer() == "sent"
    vllm.refuse("/finish_weight_update", "no weight update")
    assert serving(vllm_server) == before
    expect_all_go_on(generations)
    vllm.shutdown_weight_transfer_engine(trainer)


def test_draft_update_without_a_draft_is_refused(vllm: VLLMClient, trainer: Trainer) -> None:
    vllm.init_weight_transfer_engine(trainer, packed=False)
    vllm.refuse("/start_draft_weight_update", "'draft'", "no model")
    vllm.refuse("/finish_weight_update", "no weight update")
    vllm.shutdown_weight_transfer_engine(trainer)


_INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}


@pytest.mark.parametrize(
    ("info", "status", "words"),
    [
        ({"rank_offset": 1, "world_size": 2}, 400, ("init_info", "`master_address`")),
        ({**_INIT, "master_port": 0}, 400, ("init_info", "`$.master_port`")),
        ({**_INIT, "world_size": 1}, 400, ("init_info", "`$.world_size`")),
        ({**_INIT, "rank_offset": 2}, 400, ("no place",)),
        ({**_INIT, "packed_buffer_size_bytes": 0}, 400, ("`$.packed_buffer_size_bytes`",)),
        ({**_INIT, "backend": "gloo"}, 400, ("init_info", "`backend`")),
        ({"nccl_unique_id_b64": "", "rank_offset": 1, "world_size": 2}, 501, ("unique_id",)),
        ({"packed": True}, 400, ("CUDA IPC needs", "on the GPU of each")),
        ({}, 400, ("CUDA IPC needs", "on the GPU of each")),
        ({"packed": 2}, 400, ("init_info", "`$.packed`")),
    ],
)
def test_bad_init_info_is_refused(
    vllm: VLLMClient, info: Any, status: int, words: tuple[str, ...]
) -> None:
    vllm.refuse("/init_weight_transfer_engine", *words, status=status, json={"init_info": info})
    vllm.refuse("/start_weight_update", "init_weight_transfer_engine")


def test_server_info_adds_vllm_config_on_request(vllm_server: Server, vllm: VLLMClient) -> None:
    """The config has the fields read by TRL."""
    theirs = vllm.get("/server_info")
    assert "vllm_config" not in theirs
    info = vllm.get("/server_info", config_format="json")
    config = info.pop("vllm_config")
    assert info.keys() == theirs.keys()
    assert config["model_config"]["dtype"] == "torch." + theirs["dtype"]
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert (
        config["model_config"]["max_model_len"]
        == vllm.get("/v1/models")["data"][0]["max_model_len"]
    )
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["lora_config"] is None
    assert config["weight_transfer_config"] is not None
    # callers of SGLang's own route need no key
    assert httpx.get(vllm_server.url + "/server_info", timeout=60).status_code == 200


def test_update_weight_version_ends_no_request(vllm_server: Server, vllm: VLLMClient) -> None:
    """SGLang's call of this name aborts requests by default."""
    (generation,) = start_running(vllm_server, 1, tokens=ENDLESS)
    answer = vllm.post("/update_weight_version", {"new_version": "a name"})
    assert answer["success"]
    assert answer["new_version"] == "a name"
    assert vllm.get("/weight_info") == {"weight_version": "a name"}
    generation.wait_for_tokens(generation.count + 3)
    assert not generation.has_ended
    assert vllm_server.post("/update_weight_version", {})["status_code"] == 400
    # spans have both names, so the usual check of spans does not apply
    generation.abort()
    assert generation.output().finish_reason == "abort"


def test_weight_checker_compares_checksums(
    vllm_server: Server, vllm: VLLMClient, checkpoints: Path
) -> None:
    checksums = vllm.post("/weight_checker", {"action": "checksum"})["checksums"]
    assert any(name.endswith("lm_head.weight") for name in checksums)

    def compare() -> Any:
        return vllm.post("/weight_checker", {"action": "compare", "baseline": checksums})

    assert compare() == {"match": True, "mismatches": []}
    body = {"model_path": str(checkpoints / "v1"), "non_blocking": True}
    assert vllm_server.post("/update_weights_from_disk", body)["success"]
    # the head is the only difference between markers
    assert compare() == {"match": False, "mismatches": ["dp0.pp0.tp0.lm_head.weight"]}
    vllm.refuse("/weight_checker", "baseline", json={"action": "compare"})
    vllm.refuse("/weight_checker", "zero", status=501, json={"action": "reset"})
    expect_served(vllm_server, 1)


# ---- pauses ------------------------------------------------------------------------------


def test_pause_aborts_by_default(vllm_server: Server, vllm: VLLMClient) -> None:
    generations = start_running(vllm_server, 2, tokens=ENDLESS)
    vllm.post("/pause")
    for generation in generations:
        expect_aborted(generation)
    (queued,) = start(vllm_server, 1, tokens=3)
    until_waiting(vllm_server, 1)
    assert queued.count == 0
    vllm.post("/resume")
    expect_whole(queued)


def test_pause_without_a_lease_of_its_own_ends_by_the_setting(
    checkpoints: Path, tmp_path: Path
) -> None:
    """vLLM's pause has no lease of its own."""
    env = {"SGLANG_INFLIGHT_VLLM_ROUTES": "1", "SGLANG_INFLIGHT_PAUSE_LEASE_S": "0.5"}
    with serve(
        checkpoints / "v0", "--weight-version", "v0", log=tmp_path / "server.log", env=env
    ) as server:
        generations = start_running(server, 2, tokens=ENDLESS)
        VLLMClient(server).post("/pause", mode="keep", clear_cache=False)
        until("the pause ends by itself", lambda: not status(server)["paused"])
        expect_all_go_on(generations)
        named = pause(server, "in_place", lease_s=600)
        (holder,) = status(server)["holders"]
        assert holder["lease_left_s"] > 60
        resume(server, pause_id=named["pause_id"])


def test_pause_wait_lets_requests_end(vllm_server: Server, vllm: VLLMClient) -> None:
    generations = start_running(vllm_server, 2, tokens=60)
    vllm.post("/pause", mode="wait")
    for generation in generations:
        expect_whole(generation)
    # a second pause adds no holder, so a single call resumes
    vllm.post("/pause", mode="keep", clear_cache="false")
    vllm.post("/resume")
    assert vllm.get("/is_paused") == {"is_paused": False}


def cached(server: Server, input_ids: list[int]) -> int:
    output = expect_whole(Generation(server, tokens=2, input_ids=input_ids))
    count: int = output.meta["cached_tokens"]
    return count


def test_pause_clears_the_cache_by_default(vllm_server: Server, vllm: VLLMClient) -> None:
    input_ids = prompt(64)
    cached(vllm_server, input_ids)
    vllm.post("/pause", mode="keep", clear_cache=False)
    vllm.post("/resume")
    assert cached(vllm_server, input_ids) > 0
    for mode in ("keep", "wait", "abort"):
        vllm.post("/pause", mode=mode)
        vllm.post("/resume")
        assert cached(vllm_server, input_ids) == 0


def test_reset_prefix_cache_needs_idle_or_reset_running_requests(
    vllm_server: Server, vllm: VLLMClient
) -> None:
    input_ids = prompt(64)
    cached(vllm_server, input_ids)
    assert vllm.post("/reset_prefix_cache", reset_external="true") == {"success": True}
    assert cached(vllm_server, input_ids) == 0
    generations = start_running(vllm_server, 2, tokens=ENDLESS)
    assert vllm.post("/reset_prefix_cache") == {"success": False}
    assert cached(vllm_server, input_ids) > 0
    assert vllm.post("/reset_prefix_cache", reset_running_requests=True) == {"success": True}
    assert cached(vllm_server, input_ids) == 0
    expect_all_go_on(generations)


def test_caches_of_other_models_can_be_reset(vllm: VLLMClient) -> None:
    """A text model has none of these caches."""
    vllm.post("/reset_mm_cache")
    vllm.post("/reset_encoder_cache")


def test_sleep_level_0_pauses_until_wake_up(vllm_server: Server, vllm: VLLMClient) -> None:
    generations = start_running(vllm_server, 2, tokens=ENDLESS)
    assert vllm.get("/is_sleeping") == {"is_sleeping": False}
    vllm.refuse("/release_kv_cache_memory", "2 requests run", status=409)
    assert vllm.get("/is_sleeping") == {"is_sleeping": False}
    slept = vllm.post("/sleep", level=0, mode="keep")
    assert (slept["status"], slept["level"]) == ("sleeping", 0)
    assert vllm.get("/is_sleeping") == {"is_sleeping": True}
    settle(vllm_server, generations)
    vllm.refuse("/wake_up", "'soon'", tags=["scheduling", "soon"])
    assert vllm.get("/is_sleeping") == {"is_sleeping": True}
    woken = vllm.post("/wake_up", tags=["scheduling"])
    assert (woken["status"], woken["tags"]) == ("awake", ["scheduling"])
    expect_all_go_on(generations)


def test_refused_resume_of_a_sleeping_server_names_wake_up(vllm: VLLMClient) -> None:
    """Ranks name SGLang's calls in their errors."""
    vllm.post("/sleep", level=1, mode="keep")
    vllm.refuse("/resume", "/wake_up brings it back", status=409)
    vllm.post("/wake_up")
    assert vllm.get("/is_sleeping") == {"is_sleeping": False}


def test_abort_requests_aborts_the_named_or_all(vllm_server: Server, vllm: VLLMClient) -> None:
    one, *others = start_running(vllm_server, 3, tokens=ENDLESS)
    assert vllm.post("/abort_requests", {"request_ids": [one.rid]})["aborted"] == 1
    expect_aborted(one)
    vllm.refuse("/abort_requests", "there is none")
    assert not any(other.has_ended for other in others)
    assert vllm.post("/abort_requests", {})["aborted"] == len(others)
    for other in others:
        expect_aborted(other)


@pytest.mark.parametrize(
    ("path", "words", "call"),
    [
        ("/pause", ("`$.mode`",), {"mode": "in_place"}),
        ("/pause", ("`$.clear_cache`",), {"clear_cache": "perhaps"}),
        ("/pause", ("`wait_for_inflight_requests`",), {"wait_for_inflight_requests": "true"}),
        ("/pause", ("mode", "twice"), {"mode": ["keep", "abort"]}),
        ("/sleep", ("`$.level`",), {"level": 3}),
        ("/sleep", ("`$.mode`",), {"level": 0, "mode": "gently"}),
        ("/reset_prefix_cache", ("`$.reset_running_requests`",), {"reset_running_requests": "x"}),
        ("/get_world_size", ("`$.include_dp`",), {"include_dp": "all"}),
        ("/abort_requests", ("`$.request_ids`",), {"json": {"request_ids": "one"}}),
        ("/abort_requests", ("`$.request_ids[0]`",), {"json": {"request_ids": [""]}}),
        ("/init_weight_transfer_engine", ("`init_info`",), {"json": {}}),
        ("/finish_weight_update", ("`$.weight_version`",), {"json": {"weight_version": 7}}),
        ("/weight_checker", ("`$.action`",), {"json": {"action": "guess"}}),
        ("/weight_checker", ("object",), {"json": [1]}),
    ],
)
def test_bad_input_is_refused(
    vllm_server: Server, vllm: VLLMClient, path: str, words: tuple[str, ...], call: dict[str, Any]
) -> None:
    generations = start_running(vllm_server, 1, tokens=ENDLESS)
    before = serving(vllm_server)
    vllm.refuse(path, *words, **call)
    assert vllm.get("/is_paused") == {"is_paused": False}
    assert serving(vllm_server) == before
    expect_all_go_on(generations)


# ---- keys and routes ---------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer guessed"}], ids=["no", "wrong"])
def test_routes_need_the_key(
    vllm_server: Server, vllm: VLLMClient, headers: dict[str, str]
) -> None:
    for path, method in {**ROUTES, "/update_weight_version": "POST"}.items():
        response = httpx.request(
            method, vllm_server.url + path, headers=headers, timeout=60, **PLAIN
        )
        assert response.status_code == 401, f"{path}: {response.text}"
    assert vllm.get("/is_paused") == {"is_paused": False}


def test_routes_are_off_by_default(server: Server) -> None:
    others = {"/inference/v1/generate": "POST", "/liveness": "GET"}
    for path, method in {**ROUTES, **others}.items():
        response = httpx.request(method, server.url + path, timeout=60, **PLAIN)
        assert response.status_code == 404, f"{path}: {response.text}"
