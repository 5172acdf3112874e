"""A decode server of a disaggregated pair: SGLang's ``fake`` transfer stands in for the other.

It brings no KV and makes up the first token of a request. The marker model tells the version
of every other one without looking at KV.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.marker import FIRST
from harness.server import Server, serve
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
POOL, PROMPT = 1024, 16  # tokens
# requests that run at once
MOST = 8
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
        # the other one needs memory that CUDA pins
        "--disaggregation-decode-retraction-backup", "cpu_tensor",
        "--max-running-requests", str(MOST),
        "--max-total-tokens", str(POOL),
        "--num-reserved-decode-tokens", "8",
        "--weight-version", "v0",
        *request.param,
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("decode") / "server.log"
    with serve(checkpoints / "v0", *flags, log=log) as server:
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
    # the first token is nobody's, and the prompt's KV
    assert labels[1:] == [f"v{made - FIRST}" for made in output.tokens[1:]]
    assert labels_of(output.meta["kv_versions"])[PROMPT:] == labels[1:]
    return output


def test_spans(server: Server, checkpoints: Path) -> None:
    running = start(server, 2, tokens=POOL // 3)
    for version in (1, 2):
        for generation in running:
            generation.wait_for_tokens(generation.count + 3)
        update(server, checkpoints, version, non_blocking=True, kv_cache="fence")
    for generation in running:
        output = expect_whole(generation)
        assert {"v0", "v1", "v2"} == set(labels_of(output.meta["weight_versions"]))


def test_spans_of_what_memory_drove_out(server: Server, checkpoints: Path) -> None:
    """It waits beside the queue that other servers have, with the tokens it has."""
    running = start(server, 4, tokens=POOL // 2)
    for generation in running:
        generation.wait_for_tokens(POOL // 8)
    until("one is driven out", lambda: status(server)["running"] < len(running))
    update(server, checkpoints, 1, non_blocking=True, kv_cache="fence")
    outputs = [expect_whole(generation) for generation in running]
    assert any(output.meta["num_retractions"] for output in outputs)


def test_a_pause_waits_for_what_memory_drove_out(server: Server) -> None:
    """It has begun: held back, it would stand still amid its tokens, or keep others' memory."""
    running = start(server, 4, tokens=POOL // 2)
    for generation in running:
        generation.wait_for_tokens(POOL // 8)
    until("one is driven out", lambda: status(server)["running"] < len(running))
    (rank,) = pause(server, "wait")["ranks"]
    assert (rank["running"], rank["waiting"]) == (0, 0)
    outputs = [expect_whole(generation) for generation in running]
    assert any(output.meta["num_retractions"] for output in outputs)


def test_an_update_in_a_pause(server: Server, checkpoints: Path) -> None:
    """Exact to the token, in a server that accepts requests and is healthy meanwhile."""
    running = start(server, 2, tokens=240)
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
        assert labels == ["v0"] * count + ["v1"] * (240 - count)
    assert set(labels_of(expect_whole(later).meta["weight_versions"])) == {"v1"}


def test_pauses_that_drain(server: Server, checkpoints: Path) -> None:
    """One lets requests run to their end and no other begin, one ends all, those that wait too."""
    (running,) = start(server, 1, tokens=100)
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
    # nothing has KV, so all of it can be made anew
    update(server, checkpoints, 1)
    (later,) = start(server, 1, tokens=10)
    resume(server)
    assert set(labels_of(expect_whole(later).meta["weight_versions"])) == {"v1"}


def test_a_pause_that_retracts(server: Server, checkpoints: Path) -> None:
    """The prefill server makes the KV anew, which here is nobody. What was retracted can end."""
    running = start(server, 2, tokens=120)
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
    assert labels == ["v0"] * counts[1] + ["v1"] * (120 - counts[1])
    assert set(labels_of(output.meta["kv_versions"])) == {"v1"}


def test_what_falls_behind_while_it_waits_for_a_slot(server: Server, checkpoints: Path) -> None:
    """It has its KV, and gives it back: SGLang ends an idle server whose pool is not whole."""
    running = start(server, MOST, tokens=100)
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
    # idle, it looks at its pool, and then takes this
    for generation in start(server, 1, tokens=POOL - 10 * PROMPT):
        expect_whole(generation)


def test_what_waits_for_its_grammar_can_end(server: Server) -> None:
    """It has no KV, as others have that wait here."""
    (running,) = start(server, 1, tokens=100)
    running.wait_for_tokens(3)
    pause(server, "in_place")
    (ended,) = start(server, 1, tokens=10, sampling={"regex": f"(t[0-9]+|x{next(_rooms)})*"})
    until_waiting(server, 1)
    ended.abort()
    assert ended.output().finish_reason == "abort"
    resume(server)
    expect_whole(running)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_abort_spares_a_name_that_begins_alike(server: Server, mode: str) -> None:
    """Those that run or were retracted, and those that wait for their prompt's KV."""
    running = [*start(server, 1, 240, rid="run1"), *start(server, 1, 240, rid="run10")]
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
        assert ended.heard().finish_reason == "abort"
        output = goes_on.output()
        assert (output.finish_reason, len(output.tokens)) == ("length", goes_on.max_new_tokens)


def test_what_would_lose_requests_is_refused(server: Server, checkpoints: Path) -> None:
    """A request that is retracted here has to be sent to the prefill server again."""
    (running,) = start(server, 1, tokens=240)
    running.wait_for_tokens(3)
    body = {"model_path": str(checkpoints / "v1"), "non_blocking": True, "flush_cache": True}
    refuse(server.post("/update_weights_from_disk", body), "--disaggregation-mode")
    refuse(server.post("/inflight/rollback", {"flush_cache": True}), "--disaggregation-mode")
    # SGLang's own release asks for CUDA when the memory is gone, and ends the scheduler
    refuse(server.post("/release_memory_occupation", {}), "--disaggregation-mode")
    pause(server, "in_place")
    waits = {**body, "non_blocking": False}
    refuse(
        server.post("/update_weights_from_disk", waits), "--disaggregation-mode", status_code=409
    )
    resume(server)
    assert labels_of(expect_whole(running).meta["weight_versions"]) == ["v0"] * 240


def test_an_update_that_waits_for_requests(server: Server, checkpoints: Path) -> None:
    """Upstream's own meaning, with upstream's own fields."""
    running = start(server, 2, tokens=60)
    for generation in running:
        generation.wait_for_tokens(3)
    receipt = update(server, checkpoints, 3)
    assert receipt["weight_version"] == "v3"
    for generation in running:
        assert set(labels_of(expect_whole(generation).meta["weight_versions"])) == {"v0"}
    (later,) = start(server, 1, tokens=10)
    assert set(labels_of(expect_whole(later).meta["weight_versions"])) == {"v3"}
