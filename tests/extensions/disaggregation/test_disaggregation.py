"""A decode server whose prefill server is replaced by SGLang's ``fake`` transfer.

The fake transfer brings no KV and invents the first token of a request. The marker model writes its
version into every other token without reading KV.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.marker import FIRST
from harness.server import Server, serve
from harness.starting import STEP_MS
from tests.support.load import (
    Generation,
    Output,
    labels_of,
    pause,
    resume,
    settle,
    status,
    until,
    until_empty,
    until_waiting,
    update,
)
from tests.support.updates import refuse

FAKE_HOST = "2.2.2.2"
POOL, PROMPT = 224, 16  # tokens
# running requests at most
MOST = 4
# tokens of a request that outlasts calls, and of one of four that want more memory than there is
LASTING, LARGE = 48, POOL // 3
_rooms = itertools.count(1)


@pytest.fixture(
    scope="module", params=[(), ("--disable-overlap-schedule",)], ids=["overlap", "normal"]
)
def decode_server(
    request: pytest.FixtureRequest, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = [
        "--disaggregation-mode", "decode",
        "--disaggregation-transfer-backend", "fake",
        # the other backup needs CUDA's pinned memory
        "--disaggregation-decode-retraction-backup", "cpu_tensor",
        "--max-running-requests", str(MOST),
        "--max-total-tokens", str(POOL),
        "--num-reserved-decode-tokens", "8",
        "--weight-version", "v0",
        *request.param,
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("decode") / "server.log"
    # slow steps let few tokens outlast a test's calls
    with serve(checkpoints / "v0", *flags, log=log, env={STEP_MS: "60"}) as server:
        yield server


@pytest.fixture
def server(decode_server: Server, checkpoints: Path) -> Server:
    resume(decode_server)
    update(decode_server, checkpoints, 0)
    return decode_server


def start(server: Server, n: int, tokens: int, **fields: Any) -> list[Generation]:
    fields["bootstrap_host"] = FAKE_HOST
    return [
        Generation(server, tokens=tokens, bootstrap_room=next(_rooms), **fields) for _ in range(n)
    ]


def expect_whole(generation: Generation) -> Output:
    output = generation.output()
    assert output.finish_reason == "length", output.meta
    assert len(output.tokens) == generation.max_new_tokens
    labels = labels_of(output.meta["weight_versions"])
    # no weights made the first token, nor the prompt's KV
    assert labels[1:] == [f"v{made - FIRST}" for made in output.tokens[1:]]
    assert labels_of(output.meta["kv_versions"])[PROMPT:] == labels[1:]
    return output


def test_spans_name_each_version_of_a_running_request(server: Server, checkpoints: Path) -> None:
    running = start(server, 2, tokens=60)
    for version in (1, 2):
        for generation in running:
            generation.wait_for_tokens(generation.count + 3)
        update(server, checkpoints, version, non_blocking=True, kv_cache="fence")
    for generation in running:
        output = expect_whole(generation)
        assert {"v0", "v1", "v2"} == set(labels_of(output.meta["weight_versions"]))


def test_spans_stay_exact_when_memory_retracts_a_request(server: Server, checkpoints: Path) -> None:
    """The retracted request waits outside the usual queue and keeps its tokens."""
    running = start(server, 4, tokens=LARGE)
    for generation in running:
        generation.wait_for_tokens(POOL // 8)
    until("one is driven out", lambda: status(server)["running"] < len(running))
    update(server, checkpoints, 1, non_blocking=True, kv_cache="fence")
    outputs = [expect_whole(generation) for generation in running]
    assert any(output.meta["num_retractions"] for output in outputs)


def test_wait_pause_lets_a_request_retracted_for_memory_end(server: Server) -> None:
    """The request has begun. Held back, it would freeze between tokens, or keep others' memory."""
    running = start(server, 4, tokens=LARGE)
    for generation in running:
        generation.wait_for_tokens(POOL // 8)
    until("one is driven out", lambda: status(server)["running"] < len(running))
    (rank,) = pause(server, "wait")["ranks"]
    assert (rank["running"], rank["waiting"]) == (0, 0)
    outputs = [expect_whole(generation) for generation in running]
    assert any(output.meta["num_retractions"] for output in outputs)


def test_update_while_paused_splits_spans_at_the_exact_token(
    server: Server, checkpoints: Path
) -> None:
    """Meanwhile the server accepts requests and reports healthy."""
    running = start(server, 2, tokens=LASTING)
    for generation in running:
        generation.wait_for_tokens(3)
    pause(server, "in_place")
    (later,) = start(server, 1, tokens=10)
    until_waiting(server, 1)
    counts = settle(server, [*running, later])
    assert server.get("/health_generate")["status_code"] == 200
    update(server, checkpoints, 1, kv_cache="fence")
    resume(server)
    for generation, count in zip(running, counts, strict=False):
        labels = labels_of(expect_whole(generation).meta["weight_versions"])
        assert labels == ["v0"] * count + ["v1"] * (LASTING - count)
    assert set(labels_of(expect_whole(later).meta["weight_versions"])) == {"v1"}


def test_draining_pauses_let_requests_end_or_abort_them(server: Server, checkpoints: Path) -> None:
    (running,) = start(server, 1, tokens=LASTING)
    running.wait_for_tokens(3)
    (rank,) = pause(server, "wait")["ranks"]
    assert rank["running"] == 0
    expect_whole(running)
    waiting = start(server, 2, tokens=10)
    until_waiting(server, 2)
    assert settle(server, waiting) == [0, 0]
    (rank,) = pause(server, "abort")["ranks"]
    assert (rank["running"], rank["waiting"], rank["aborted"]) == (0, 0, 2)
    for generation in waiting:
        generation.wait_for_end()
    # no KV exists, so recomputing all of it is possible
    update(server, checkpoints, 1)
    (later,) = start(server, 1, tokens=10)
    resume(server)
    assert set(labels_of(expect_whole(later).meta["weight_versions"])) == {"v1"}


def test_retract_pause_keeps_tokens_and_versions(server: Server, checkpoints: Path) -> None:
    """No prefill server exists to recompute the KV. A retracted request can still be aborted."""
    running = start(server, 2, tokens=LASTING)
    for generation in running:
        generation.wait_for_tokens(3)
    (rank,) = pause(server, "retract")["ranks"]
    assert rank["retracted"] == 2
    left, _ = counts = settle(server, running)
    running[0].abort()
    output = running[0].output()
    assert (output.finish_reason, len(output.tokens)) == ("abort", left)
    update(server, checkpoints, 1)
    resume(server)
    output = running[1].output()
    labels = labels_of(output.meta["weight_versions"])
    assert labels[1:] == [f"v{made - FIRST}" for made in output.tokens[1:]]
    assert labels == ["v0"] * counts[1] + ["v1"] * (LASTING - counts[1])
    assert set(labels_of(output.meta["kv_versions"])) == {"v1"}


def test_request_past_its_version_lag_frees_its_kv(server: Server, checkpoints: Path) -> None:
    """SGLang ends an idle server if KV slots are missing from its pool."""
    running = start(server, MOST, tokens=30)
    for generation in running:
        generation.wait_for_tokens(3)
    late = {"custom_params": {"max_version_lag": 0}}
    behind = start(server, 2, tokens=10, sampling=late)
    until_waiting(server, 2)
    pause(server, "in_place")
    update(server, checkpoints, 1, kv_cache="fence")
    for generation in behind:
        output = generation.output()
        assert output.finish_reason == "abort"
        assert "max_version_lag is 0" in output.meta["finish_reason"]["message"]
        assert len(labels_of(output.meta["kv_versions"])) == PROMPT
    resume(server)
    for generation in running:
        expect_whole(generation)
    until_empty(server)
    # the idle check of the pool comes before this request
    for generation in start(server, 1, tokens=POOL - (MOST + 2) * PROMPT):
        expect_whole(generation)


def test_request_waiting_for_its_grammar_can_be_aborted(server: Server) -> None:
    """Unlike other waiting requests here, this one has no KV."""
    (running,) = start(server, 1, tokens=LASTING)
    running.wait_for_tokens(3)
    pause(server, "in_place")
    (ended,) = start(server, 1, tokens=10, sampling={"regex": f"(t[0-9]+|x{next(_rooms)})*"})
    until_waiting(server, 1)
    ended.abort()
    assert ended.output().finish_reason == "abort"
    resume(server)
    expect_whole(running)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_abort_spares_a_request_with_a_longer_name(server: Server, mode: str) -> None:
    """Applies to running, to retracted, and to requests waiting for their prompt's KV."""
    running = [*start(server, 1, LASTING, rid="run1"), *start(server, 1, LASTING, rid="run10")]
    for generation in running:
        generation.wait_for_tokens(3)
    pause(server, mode)
    waiting = [*start(server, 1, 10, rid="wait1"), *start(server, 1, 10, rid="wait10")]
    until("they wait", lambda: status(server)["waiting"] >= len(waiting))
    for ended, _ in (running, waiting):
        ended.abort()
    resume(server)
    for ended, goes_on in (running, waiting):
        ended.wait_for_end()
        assert ended.output_so_far().finish_reason == "abort"
        output = goes_on.output()
        assert (output.finish_reason, len(output.tokens)) == ("length", goes_on.max_new_tokens)


def test_calls_that_would_lose_requests_are_refused(server: Server, checkpoints: Path) -> None:
    """A retracted request can be recomputed only by the prefill server."""
    (running,) = start(server, 1, tokens=LASTING)
    running.wait_for_tokens(3)
    body = {"model_path": str(checkpoints / "v1"), "non_blocking": True, "flush_cache": True}
    refuse(server.post("/update_weights_from_disk", body), "--disaggregation-mode")
    refuse(server.post("/inflight/rollback", {"flush_cache": True}), "--disaggregation-mode")
    # SGLang's own release calls CUDA when the memory is gone, which ends the scheduler
    refuse(server.post("/release_memory_occupation", {}), "--disaggregation-mode")
    pause(server, "in_place")
    waits = {**body, "non_blocking": False}
    refuse(
        server.post("/update_weights_from_disk", waits), "--disaggregation-mode", status_code=409
    )
    resume(server)
    assert labels_of(expect_whole(running).meta["weight_versions"]) == ["v0"] * LASTING


def test_update_with_upstreams_fields_waits_for_requests(server: Server, checkpoints: Path) -> None:
    running = start(server, 2, tokens=24)
    for generation in running:
        generation.wait_for_tokens(3)
    receipt = update(server, checkpoints, 3)
    assert receipt["weight_version"] == "v3"
    for generation in running:
        assert set(labels_of(expect_whole(generation).meta["weight_versions"])) == {"v0"}
    (later,) = start(server, 1, tokens=10)
    assert set(labels_of(expect_whole(later).meta["weight_versions"])) == {"v3"}


def test_contract_is_about_the_first_token_from_the_prefill_server(
    server: Server, checkpoints: Path
) -> None:
    """The fake transfer's first token counts as this server's own."""
    (kept,) = start(server, 1, tokens=4, exact_weight_version="v0", version_timeout_s=0)
    expect_whole(kept)
    (unkept,) = start(server, 1, tokens=4, exact_weight_version="v1", version_timeout_s=0)
    unkept.wait_for_end()
    assert (unkept.status, unkept.count) == (503, 0)
    (refused,) = start(server, 1, tokens=4, min_epoch=0)
    refused.wait_for_end()
    assert refused.status == 400
    assert "count epochs" in (refused.refusal or "")
    # it has its prompt's KV, but no token of its own
    pause(server, "in_place")
    (changed,) = start(server, 1, tokens=4, exact_weight_version="v0")
    until_waiting(server, 1)
    update(server, checkpoints, 1, kv_cache="fence")
    resume(server)
    output = changed.output()
    assert output.meta["finish_reason"]["status_code"] == 503
    assert "exact_weight_version is 'v0'" in output.meta["finish_reason"]["message"]
    # the token from the prefill server, with its own version
    assert labels_of(output.meta["weight_versions"]) == ["v1"]
    until_empty(server)
    (last,) = start(server, 1, tokens=4)
    expect_whole(last)
