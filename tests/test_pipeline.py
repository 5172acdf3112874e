"""A pipeline of two stages: a microbatch's tokens show that both stages used the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import marker
from harness.server import Server, serve
from tests.support.kv_runs import kv_runs, kv_without_reuse
from tests.support.load import (
    ENDLESS,
    Output,
    ask,
    expect_aborted,
    expect_all_go_on,
    expect_spans_in_chunks,
    expect_whole,
    more_tokens,
    pause,
    prompt,
    resume,
    settle,
    start,
    start_running,
    status,
    until,
    until_waiting,
    update,
    versions_of,
)
from tests.support.plugins import with_plugin
from tests.support.pool import CHUNK, empty
from tests.support.sparse import SPARSE_SOURCES, SparseSender, changes
from tests.support.updates import by_reference, refuse, succeed, tensor_body

pytest_plugins = ["tests.support.fixtures"]

VERSIONS = 4
BLOCK = marker.HIDDEN // VERSIONS
# token of a forward with different weights in its stages
TORN = marker.VOCAB - 1


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Mark a version in the first stage's embeddings, and let the last stage's head look for it."""
    weights = marker.tensors(version, layers=2)
    own = slice(version * BLOCK, (version + 1) * BLOCK)
    embeddings, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embeddings.zero_()[:, own] = 1.0
    # twice the logit of a matching version, so that TORN wins over all other tokens
    head[TORN] = 2.0
    head[TORN, own] = 0.0
    return weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    for version in range(VERSIONS):
        marker.write(folder / f"v{version}", tensors(version), marker.TWO_LAYERS)
    return folder


@pytest.fixture(scope="module", params=[0, 1], ids=["depth-0", "depth-1"])
def stages(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ["--pp-size", "2", "--pp-async-batch-depth", str(request.param)]
    flags += ["--max-running-requests", "16", "--weight-version", "v0"]
    flags += ["--chunked-prefill-size", str(CHUNK)]
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serve(folder / "v0", *flags, log=log) as server:
        yield server


@pytest.fixture
def pipeline(stages: Server) -> Iterator[Server]:
    yield stages
    # requests of a failed test would hold up the next test's blocking update
    if stages.is_alive():
        resume(stages)
        empty(stages)


def test_spans_are_exact_in_both_stages(pipeline: Server, folder: Path) -> None:
    """Some requests start while the weights change."""
    update(pipeline, folder, 0)
    generations = start_running(pipeline, 5, tokens=ENDLESS)
    for version in range(1, VERSIONS):
        generations += start(pipeline, 1, tokens=ENDLESS)
        update(pipeline, folder, version, non_blocking=True, kv_cache="fence")
        for generation in generations:
            generation.wait_for_tokens(generation.count + 2)
    outputs = expect_all_go_on(generations)
    for output in outputs:
        expect_spans_in_chunks(output)
        assert kv_runs(output) == kv_without_reuse(output, 16)
    for output in outputs[:5]:
        assert versions_of(output) == ["v0", "v1", "v2", "v3"]


def expect_exact(output: Output) -> None:
    expect_spans_in_chunks(output)
    assert TORN not in output.tokens


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_freezes_both_stages(pipeline: Server, folder: Path, mode: str) -> None:
    """Requests of all microbatches stop, then continue."""
    update(pipeline, folder, 0)
    generations = start_running(pipeline, 5, tokens=ENDLESS)
    answer = pause(pipeline, mode)
    seen = settle(pipeline, generations)
    counted = [(rank["pp_rank"], rank["running"], rank["retracted"]) for rank in answer["ranks"]]
    count = (5, 0) if mode == "in_place" else (0, 5)
    assert sorted(counted) == [(0, *count), (1, *count)]
    # the status of the second stage comes from that stage itself
    assert {rank["state"] for rank in status(pipeline)["ranks"]} == {"frozen"}
    # a blocking update has no running request to wait for
    update(pipeline, folder, 1, flush_cache=False)
    (late,) = start(pipeline, 1, tokens=ENDLESS)
    until_waiting(pipeline, 1 if mode == "in_place" else 6)
    generations[4].abort()
    assert settle(pipeline, generations) == seen
    resume(pipeline)
    assert generations[4].output().finish_reason == "abort"
    outputs = expect_all_go_on([*generations[:4], late])
    for output in outputs:
        expect_exact(output)
    assert [versions_of(output) for output in outputs] == [["v0", "v1"]] * 4 + [["v1"]]
    for output in outputs[:4]:
        if mode == "in_place":
            assert kv_runs(output) == kv_without_reuse(output, 16)
        else:
            assert [version for version, _ in kv_runs(output)] == ["v1"]


def test_draining_pauses_end_in_both_stages(pipeline: Server, folder: Path) -> None:
    update(pipeline, folder, 0)
    short = start_running(pipeline, 3, tokens=30)
    answer = pause(pipeline, "wait")
    assert [rank["running"] for rank in answer["ranks"]] == [0, 0]
    for generation in short:
        expect_exact(expect_whole(generation))
    (waiting,) = start(pipeline, 1, tokens=ENDLESS)
    until_waiting(pipeline, 1)
    resume(pipeline)
    waiting.wait_for_tokens(3)
    answer = pause(pipeline, "abort")
    assert [rank["aborted"] for rank in answer["ranks"]] == [1, 1]
    expect_exact(expect_aborted(waiting))
    resume(pipeline)


def test_wait_timeout_and_lease_end_in_the_same_turn_of_both_stages(
    pipeline: Server, folder: Path
) -> None:
    update(pipeline, folder, 0)
    generations = start_running(pipeline, 4, tokens=ENDLESS)
    answer = pause(pipeline, "wait", timeout_s=0.2)
    assert [rank["running"] for rank in answer["ranks"]] == [4, 4]
    frozen = settle(pipeline, generations)
    # a request frozen amid its prefill
    generations += start(pipeline, 1, tokens=ENDLESS, input_ids=prompt(8 * CHUNK))
    until_waiting(pipeline, 1)
    resume(pipeline)
    pause(pipeline, "retract", lease_s=0.4)
    until("the lease is over", lambda: not status(pipeline)["paused"])
    outputs = expect_all_go_on(generations)
    for output, count in zip(outputs[:4], frozen, strict=True):
        assert len(output.tokens) > count
    for output in outputs:
        expect_exact(output)


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_commit_between_turns_keeps_tokens_exact(pipeline: Server, folder: Path, kv: str) -> None:
    """A recomputing commit waits until no microbatch is in flight; other commits do not wait."""
    update(pipeline, folder, 0)
    generations = start_running(pipeline, 5, tokens=ENDLESS)
    receipt = update(pipeline, folder, 2, non_blocking=True, kv_cache=kv)
    # each stage counts the requests
    assert receipt["retracted"] == 2 * 5 * (kv == "recompute")
    for generation in generations:
        generation.wait_for_tokens(generation.count + 3)
    ask(pipeline, "POST", "/inflight/rollback", {"kv_cache": kv})
    for output in expect_all_go_on(generations):
        expect_exact(output)
        assert versions_of(output) == ["v0", "v2", "v0"]
        if kv == "recompute":
            assert [version for version, _ in kv_runs(output)] == ["v0"]


def test_update_takes_one_payload_per_stage(pipeline: Server, folder: Path) -> None:
    """A handle to shared memory on a CPU can be read only once."""
    update(pipeline, folder, 0)
    generations = start_running(pipeline, 4, tokens=ENDLESS)
    path = "/update_weights_from_tensor"
    named: dict[str, Any] = {"non_blocking": True, "kv_cache": "keep"}

    def handles(count: int) -> list[str]:
        return [by_reference([*tensors(1).items()]) for _ in range(count)]

    for count in (0, 3):
        body = {"serialized_named_tensors": handles(count), **named}
        refuse(
            pipeline.post(path, body),
            f"{count} payloads; this server takes 1, one for each tensor-parallel rank, or 2, "
            "one for each rank of each stage",
        )
    body = {"serialized_named_tensors": handles(2), "weight_version": "v1", **named}
    ask(pipeline, "POST", path, body)
    more_tokens(generations)
    ask(pipeline, "POST", path, tensor_body(tensors(2), weight_version="v2", **named))
    for output in expect_all_go_on(generations):
        expect_exact(output)
        assert versions_of(output) == ["v0", "v1", "v2"]


@pytest.mark.parametrize("source", SPARSE_SOURCES)
def test_sparse_update_reaches_both_stages(
    pipeline: Server, folder: Path, sparse_sender: SparseSender, source: str
) -> None:
    update(pipeline, folder, 0)
    generations = start_running(pipeline, 4, tokens=ENDLESS)
    for version in 1, 2:
        answer = sparse_sender.send(
            pipeline,
            source,
            changes(tensors(version - 1), tensors(version)),
            base_version=f"v{version - 1}",
            weight_version=f"v{version}",
            ranks=2,
            non_blocking=True,
            kv_cache="keep",
        )
        succeed(answer)
        more_tokens(generations)
    for output in expect_all_go_on(generations):
        expect_exact(output)
        assert versions_of(output) == ["v0", "v1", "v2"]


def test_pause_modes_follow_each_other(pipeline: Server, folder: Path) -> None:
    update(pipeline, folder, 0)
    generations = start_running(pipeline, 3, tokens=ENDLESS)
    for mode in ("in_place", "retract", "in_place"):
        pause(pipeline, mode)
        settle(pipeline, generations)
    assert pipeline.post("/flush_cache")["status_code"] == 200
    resume(pipeline)
    for output in expect_all_go_on(generations):
        expect_exact(output)
        assert output.meta["num_retractions"] == 1


def test_two_ranks_a_stage_pause_update_and_release(folder: Path, tmp_path: Path) -> None:
    flags = ("--pp-size", "2", "--tp-size", "2", "--enable-memory-saver", "--weight-version", "v0")
    with serve(folder / "v0", *flags, log=tmp_path / "log") as server:
        generations = start_running(server, 4, tokens=ENDLESS)
        answer = pause(server, "in_place", lease_s=0.5)
        assert [rank["running"] for rank in answer["ranks"]] == [4] * 4
        until("the lease is over", lambda: not status(server)["paused"])
        update(server, folder, 1, non_blocking=True, kv_cache="recompute")
        more_tokens(generations)
        pause(server, "retract")
        discard = {"keep_weights": "discard"}
        refuse(server.post("/release_memory_occupation", discard), "pipeline", status_code=409)
        # the default keeps a copy of the weights
        ask(server, "POST", "/release_memory_occupation", {})
        refuse(server.post("/continue_generation", {}), "released", status_code=409)
        ask(server, "POST", "/resume_memory_occupation", {})
        resume(server)
        for output in expect_all_go_on(generations):
            expect_exact(output)
            assert versions_of(output) == ["v0", "v1"]


def test_in_place_update_is_refused_in_a_pipeline(folder: Path, tmp_path: Path) -> None:
    """The stage being written would stop, and the other would wait for it."""
    flags = ("--pp-size", "2", "--weight-version", "v0")
    env = {"SGLANG_INFLIGHT_STAGING": "off"}
    with serve(folder / "v0", *flags, log=tmp_path / "log", env=env) as server:
        generations = start_running(server, 4, tokens=ENDLESS)
        body = {"model_path": str(folder / "v1"), "non_blocking": True, "flush_cache": False}
        refuse(server.post("/update_weights_from_disk", body), "--pp-size")
        for output in expect_all_go_on(generations):
            expect_exact(output)
            assert versions_of(output) == ["v0"]


def test_unsupported_pipeline_keeps_sglangs_own_pause(folder: Path, tmp_path: Path) -> None:
    """Our pause states are missing in this configuration's loop."""
    flags = ["--pp-size", "2", "--tp-size", "2", "--attn-dp-size", "2", "--weight-version", "v0"]
    flags += ["--log-requests", "--log-requests-level", "0"]
    log = tmp_path / "log"
    with serve(folder / "v0", *flags, log=log, env=with_plugin("attention_dp")) as server:
        generations = start_running(server, 4, tokens=ENDLESS)
        for fields in ({"mode": "in_place"}, {"lease_s": 5}, {"new_id": "mine"}):
            refuse(server.post("/pause_generation", fields), "--pp-size 1")
        can = status(server)["capabilities"]
        assert ("--pp-size 1" in can["pause"], can["stage"]) == (True, None)
        expect_all_go_on(generations[:1])

        answer = ask(server, "POST", "/pause_generation", {})
        assert (answer["paused"], answer["mode"]) == (True, "abort")
        assert "pause_id" not in answer
        for generation in generations[1:]:
            expect_aborted(generation)
        (held,) = start(server, 1, tokens=8)
        until("the request has come", lambda: held.rid in server.log_text())
        # the status asks the ranks, and they have no pause
        assert (status(server)["paused"], status(server)["mode"]) == (True, "abort")
        assert ask(server, "GET", "/is_paused") == {"is_paused": True}
        update(server, folder, 1)
        refuse(server.post("/continue_generation", {"pause_id": "mine"}), "mine", status_code=409)

        assert resume(server)["paused"] is False
        assert versions_of(expect_whole(held)) == ["v1"]
        assert ask(server, "GET", "/is_paused") == {"is_paused": False}
        assert status(server)["paused"] is False


def test_pipeline_keeps_no_kv_by_its_age(pipeline: Server, folder: Path) -> None:
    body = {"model_path": str(folder / "v1"), "non_blocking": True, "kv_max_age": 1}
    answer = pipeline.post("/update_weights_from_disk", body)
    assert answer["status_code"] == 400
    assert "--pp-size" in answer["message"]
    asked = {"input_ids": prompt(), "sampling_params": {"custom_params": {"kv_max_age": 1}}}
    answer = pipeline.post("/generate", asked)
    assert answer["status_code"] == 400
    assert "--pp-size" in str(answer)


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_both_stages_end_requests_whose_contract_a_commit_breaks(
    pipeline: Server, folder: Path, kv: str
) -> None:
    """One waits, one is in the middle of its prompt."""
    update(pipeline, folder, 0)
    generations = start_running(pipeline, 4, tokens=ENDLESS)
    pause(pipeline, "in_place")
    contract = {"exact_weight_version": "v0"}
    bound = start(pipeline, 1, tokens=4, input_ids=prompt(8 * CHUNK), **contract)
    until_waiting(pipeline, 1)
    resume(pipeline)
    pause(pipeline, "in_place")
    bound += start(pipeline, 2, tokens=4, **contract)
    (free,) = start(pipeline, 1, tokens=4)
    until_waiting(pipeline, 3)
    update(pipeline, folder, 1, kv_cache=kv)
    resume(pipeline)
    for generation in bound:
        output = generation.output()
        assert (output.tokens, output.meta["finish_reason"]["status_code"]) == ([], 503)
    expect_exact(expect_whole(free))
    for output in expect_all_go_on(generations):
        expect_exact(output)
