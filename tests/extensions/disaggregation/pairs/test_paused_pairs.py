"""Pauses of a prefill server and of a decode server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness import marker
from harness.marker import token
from harness.server import Server, schedulers
from tests.support.idle import expect_nothing_spins
from tests.support.load import (
    Output,
    expect_spans,
    labels_of,
    pass_boundaries,
    pause,
    prompt,
    resume,
    settle,
    status,
    until,
    update,
)
from tests.support.pair import CHUNK, Pair, PairedGeneration
from tests.support.updates import refuse


def expect_whole(generation: PairedGeneration) -> Output:
    """Check both servers' outputs and the spans. The first token is the prefill server's."""
    output = generation.output()
    assert output.finish_reason == "length", output.meta
    assert len(output.tokens) == generation.max_new_tokens
    expect_spans(output)
    assert generation.prefill.output().finish_reason == "length"
    return output


def run(pair: Pair, n: int, *, tokens: int) -> list[PairedGeneration]:
    """Start ``n`` requests and wait until the decode server runs them."""
    generations = [pair.generate(tokens=tokens) for _ in range(n)]
    for generation in generations:
        generation.wait_for_tokens(3)
    return generations


def count_requests(server: Server) -> int:
    now = status(server)
    return int(now["running"] + now["waiting"])


@pytest.mark.parametrize("mode", ["in_place", "wait"])
def test_paused_decode_server_holds_requests(pair: Pair, checkpoints: Path, mode: str) -> None:
    """Later requests are prefilled, then wait."""
    running = run(pair, 2, tokens=200)
    (rank,) = pause(pair.decode, mode)["ranks"]
    assert rank["running"] == (2 if mode == "in_place" else 0)
    later = pair.generate(tokens=20)
    until("it waits", lambda: status(pair.decode)["waiting"] == 1)
    counts = settle(pair.decode, [*running, later])
    assert counts[-1] == 0
    assert pair.decode.get("/health_generate")["status_code"] == 200
    update(pair.decode, checkpoints, 1, kv_cache="fence")
    resume(pair.decode)
    for generation, count in zip(running, counts, strict=False):
        labels = labels_of(expect_whole(generation).meta["weight_versions"])
        assert labels == ["v0"] * count + ["v1"] * (200 - count)
    assert set(labels_of(expect_whole(later).meta["weight_versions"])[1:]) == {"v1"}


def test_retract_on_the_decode_server_recomputes_kv_on_the_prefill_server(
    pair: Pair, checkpoints: Path
) -> None:
    """All KV then has the prefill server's version."""
    running = run(pair, 2, tokens=200)
    (rank,) = pause(pair.decode, "retract")["ranks"]
    assert rank["retracted"] == 2
    counts = settle(pair.decode, running)
    for server in pair.servers:
        update(server, checkpoints, 1)
    resume(pair.decode)
    for generation, count in zip(running, counts, strict=True):
        output = expect_whole(generation)
        labels = labels_of(output.meta["weight_versions"])
        assert labels == ["v0"] * count + ["v1"] * (200 - count)
        assert set(labels_of(output.meta["kv_versions"])) == {"v1"}


def test_retracted_request_can_be_aborted(pair: Pair) -> None:
    ended, goes_on = run(pair, 2, tokens=200)
    pause(pair.decode, "retract")
    count, _ = settle(pair.decode, [ended, goes_on])
    ended.abort()
    output = ended.output()
    assert output.finish_reason == "abort"
    assert len(output.tokens) == count
    expect_spans(output)
    resume(pair.decode)
    expect_whole(goes_on)


@pytest.mark.parametrize("mode", ["in_place", "retract", "wait"])
def test_paused_prefill_server_leaves_the_decode_server_running(
    pair: Pair, checkpoints: Path, mode: str
) -> None:
    """The pause comes between chunks of a prompt, with other prompts queued."""
    running = run(pair, 1, tokens=200)
    long = pair.generate(tokens=20, input_ids=prompt(8 * CHUNK))
    behind = pair.generate(tokens=20)
    answer = pause(pair.prefill, mode)
    (rank,) = answer["ranks"]
    assert answer["mode"] == mode
    if mode != "in_place":
        assert rank["running"] == 0
    later = pair.generate(tokens=20)
    until("it waits", lambda: status(pair.prefill)["waiting"] >= 1)
    assert pair.prefill.get("/health_generate")["status_code"] == 200
    expect_whole(running[0])
    update(pair.prefill, checkpoints, 1, kv_cache="fence")
    assert later.count == 0
    resume(pair.prefill)
    for generation in (long, behind, later):
        assert set(expect_whole(generation).tokens[1:]) == {token(0)}
    assert later.output().tokens[0] == token(1)


def test_blocking_update_of_a_prefill_server_waits_for_begun_prompts(
    pair: Pair, checkpoints: Path
) -> None:
    """Without running requests, the flush may drop all KV."""
    long = pair.generate(tokens=20, input_ids=prompt(8 * CHUNK))
    until("it has begun", lambda: status(pair.prefill)["running"] or long.count)
    assert update(pair.prefill, checkpoints, 1)["weight_version"] == "v1"
    assert expect_whole(long).tokens[0] == token(0)
    assert expect_whole(pair.generate(tokens=20)).tokens[0] == token(1)


def test_pause_and_update_of_both_servers_split_spans_at_the_exact_token(
    pair: Pair, checkpoints: Path
) -> None:
    running = run(pair, 2, tokens=200)
    long = pair.generate(tokens=20, input_ids=prompt(8 * CHUNK))
    for server in pair.servers:
        pause(server, "in_place")
    counts = settle(pair.decode, [*running, long])
    for server in pair.servers:
        update(server, checkpoints, 1, kv_cache="fence")
    for server in reversed(pair.servers):
        resume(server)
    for generation, count in zip(running, counts, strict=False):
        labels = labels_of(expect_whole(generation).meta["weight_versions"])
        assert labels == ["v0"] * count + ["v1"] * (200 - count)
    expect_whole(long)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_aborting_pause_of_one_server_leaves_no_request(
    pair: Pair, checkpoints: Path, side: str
) -> None:
    running = run(pair, 2, tokens=400)
    long = pair.generate(tokens=20, input_ids=prompt(8 * CHUNK))
    until("it has begun", lambda: status(pair.prefill)["running"] or long.count)
    server = pair.prefill if side == "prefill" else pair.decode
    pause(server, "abort", lease_s=30)
    # no KV exists, so recomputing all of it is possible
    update(server, checkpoints, 1)
    later = pair.generate(tokens=20)
    resume(server)
    expect_whole(later)
    for generation in running:
        reason = generation.output().finish_reason
        assert reason == ("length" if side == "prefill" else "abort")
    # SGLang does the same: the decode server waits for the aborted prefill until its own abort
    long.abort()
    long.wait_for_end()
    until("all have left", lambda: sum(map(count_requests, pair.servers)) == 0)


def test_leases_end_the_pauses_of_both_servers(pair: Pair) -> None:
    (running,) = run(pair, 1, tokens=200)
    for server in pair.servers:
        pause(server, "in_place", lease_s=1)
    later = pair.generate(tokens=20)
    expect_whole(running)
    expect_whole(later)


def test_recompute_on_a_decode_server_is_refused(pair: Pair, checkpoints: Path) -> None:
    (running,) = run(pair, 1, tokens=200)
    pause(pair.decode, "in_place")
    body = {"model_path": str(checkpoints / "v1"), "weight_version": "v1", "flush_cache": True}
    refuse(
        pair.decode.post("/update_weights_from_disk", body),
        "--disaggregation-mode",
        status_code=409,
    )
    assert status(pair.decode)["weight_version"] == "v0"
    update(pair.decode, checkpoints, 1, kv_cache="fence")
    resume(pair.decode)
    assert set(labels_of(expect_whole(running).meta["weight_versions"])) == {"v0", "v1"}


def test_pauses_during_a_prompt_lose_no_kv(pair: Pair, tmp_path: Path) -> None:
    """These random weights read the KV, so lost KV would change tokens."""
    torch.manual_seed(0)
    random = {
        name: torch.randn_like(weights) * 0.2 if weights.dim() > 1 else weights
        for name, weights in marker.tensors(0).items()
    }
    body = {"model_path": str(marker.write(tmp_path / "random", random))}
    asked = prompt(8 * CHUNK)
    outputs: list[list[int]] = []
    for paused in ((), (pair.prefill,), (pair.decode,)):
        for server in pair.servers:
            # the update clears the prompt from the cache
            assert server.post("/update_weights_from_disk", body)["success"]
        generation = pair.generate(tokens=30, input_ids=asked)
        while paused and not generation.has_ended:
            for server in paused:
                pause(server, "in_place")
                pass_boundaries(server, 2)
                resume(server)
        outputs.append(generation.output().tokens)
    assert outputs[1:] == [outputs[0]] * 2
    assert len(set(outputs[0])) > 5


def test_nothing_spins_in_a_pause(pair: Pair) -> None:
    (running,) = run(pair, 1, tokens=200)
    for server in pair.servers:
        pause(server, "in_place")
    settle(pair.decode, [running])
    expect_nothing_spins(
        [rank for server in pair.servers for rank in schedulers(server.process.pid)]
    )
    for server in pair.servers:
        resume(server)
    expect_whole(running)
