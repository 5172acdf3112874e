"""``weight_versions`` names the weights behind each token, wherever the weights change."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.marker import FIRST, token
from harness.server import Server
from tests.support.load import (
    ENDLESS,
    Generation,
    Output,
    ask,
    count_of,
    expect_all_go_on,
    expect_spans,
    expect_spans_in_chunks,
    expect_whole,
    labels_of,
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
from tests.support.pool import CHUNK

# fields that decide about old KV at a commit
KV_FIELDS: dict[str, dict[str, Any]] = {
    "flush": {"flush_cache": True},
    "no flush": {"flush_cache": False},
    "recompute": {"kv_cache": "recompute"},
    "fence": {"kv_cache": "fence"},
    "keep": {"kv_cache": "keep"},
}
RECOMPUTES = {"flush", "recompute"}


def word(version: int) -> str:
    """Return the text of the token made by ``version``."""
    return f"t{FIRST + version}"


@dataclass
class Load:
    """Five running outputs: streams, a whole answer, and two outputs of one prompt."""

    streams: list[Generation]
    twins: Generation
    whole: Generation

    def end(self, server: Server) -> list[Output]:
        """Return the outputs, after some more tokens on each stream."""
        for generation in (*self.streams, self.twins):
            generation.wait_for_tokens(generation.count + 3)
        ask(server, "POST", "/abort_request", {"abort_all": True})
        generations = (*self.streams, self.twins, self.whole)
        outputs = [output for generation in generations for output in generation.outputs()]
        for output in outputs:
            assert output.endings == 1
            expect_spans(output)
            expect_spans_in_chunks(output)
        return outputs


def mixed_load(server: Server) -> Load:
    (whole,) = start(server, 1, tokens=ENDLESS, stream=False)
    (twins,) = start_running(server, 1, tokens=ENDLESS, n=2)
    streams = start_running(server, 2, tokens=ENDLESS)
    until("all of them run", lambda: status(server)["running"] == 5)
    return Load(streams, twins, whole)


@pytest.mark.guards_fix
def test_spans_are_exact_across_an_update_while_frozen(server: Server, checkpoints: Path) -> None:
    """The last token before the pause, under overlap, belongs to the old weights."""
    generations = start_running(server, 4, tokens=ENDLESS)
    for version in (1, 2):
        pause(server, "in_place")
        settle(server, generations)
        update(server, checkpoints, version, flush_cache=False)
        resume(server)
        for generation in generations:
            generation.wait_for_tokens(generation.count + 3)
    for output in expect_all_go_on(generations):
        assert versions_of(output) == ["v0", "v1", "v2"]


@pytest.mark.guards_fix
def test_every_chunk_has_exact_spans(server: Server, checkpoints: Path) -> None:
    generations = start_running(server, 4, tokens=ENDLESS)
    pause(server, "in_place")
    update(server, checkpoints, 1, flush_cache=False)
    resume(server)
    for output in expect_all_go_on(generations):
        assert len(output.chunks) > 3
        expect_spans_in_chunks(output)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_spans_are_exact_across_an_update_while_paused(
    any_server: Server, checkpoints: Path, mode: str
) -> None:
    load = mixed_load(any_server)
    pause(any_server, mode)
    update(any_server, checkpoints, 1, flush_cache=mode == "retract")
    resume(any_server)
    for output in load.end(any_server):
        assert versions_of(output) == ["v0", "v1"]


@pytest.mark.parametrize("kv", KV_FIELDS)
def test_spans_are_exact_across_an_update_in_flight(
    any_server: Server, checkpoints: Path, kv: str
) -> None:
    load = mixed_load(any_server)
    receipt = update(any_server, checkpoints, 1, non_blocking=True, **KV_FIELDS[kv])
    assert (receipt["base_version"], receipt["weight_version"]) == ("v0", "v1")
    retractions = int(kv in RECOMPUTES)
    assert receipt["retracted"] == 5 * retractions
    for output in load.end(any_server):
        assert versions_of(output) == ["v0", "v1"]
        assert output.meta["num_retractions"] == retractions
    assert ask(any_server, "GET", "/model_info")["weight_version"] == "v1"


@pytest.mark.parametrize("kv", ["fence", "recompute"])
def test_spans_are_exact_across_a_commit_during_prefill(
    any_server: Server, checkpoints: Path, kv: str
) -> None:
    """A prompt half computed by the old weights yields tokens of the new ones."""
    running = start_running(any_server, 2, tokens=ENDLESS)
    pause(any_server, "in_place")
    (prefilling,) = start(any_server, 1, tokens=ENDLESS, input_ids=prompt(8 * CHUNK))
    until_waiting(any_server, 1)
    resume(any_server)
    (rank,) = pause(any_server, "in_place")["ranks"]
    assert (rank["running"], rank["waiting"]) == (3, 0)
    update(any_server, checkpoints, 1, non_blocking=True, kv_cache=kv)
    resume(any_server)
    *before, amid = expect_all_go_on([*running, prefilling])
    assert versions_of(amid) == ["v1"]
    for output in before:
        assert versions_of(output) == ["v0", "v1"]


def test_spans_of_updates_without_a_name_differ_by_epoch(
    any_server: Server, checkpoints: Path
) -> None:
    streams = start_running(any_server, 2, tokens=ENDLESS)
    (whole,) = start(any_server, 1, tokens=ENDLESS, stream=False)
    until("all of them run", lambda: status(any_server)["running"] == 3)
    counts = []
    for version in (1, 2):
        body = {"model_path": str(checkpoints / f"v{version}"), "kv_cache": "keep"}
        receipt = ask(
            any_server, "POST", "/update_weights_from_disk", {**body, "non_blocking": True}
        )
        counts.append((version, receipt["epoch"]))
        for stream in streams:
            stream.wait_for_tokens(stream.count + 3)
    ask(any_server, "POST", "/abort_request", {"abort_all": True})
    version_of = {counts[0][1] - 1: 0} | {epoch: version for version, epoch in counts}
    for generation in (*streams, whole):
        output = generation.output()
        for spans in (output.meta["weight_versions"], output.meta["kv_versions"]):
            assert [span["version"] for span in spans] == ["v0"] * 3
            assert [span["epoch"] for span in spans] == list(version_of)
        for span in output.meta["weight_versions"]:
            made = set(output.tokens[span["start"] : span["end"]])
            assert made == {token(version_of[span["epoch"]])}, span
        expect_spans_in_chunks(output)


def test_renaming_the_version_starts_a_span_but_no_epoch(server: Server) -> None:
    (stream,) = start_running(server, 1, tokens=ENDLESS)
    epoch = status(server)["epoch"]
    for name in ("a name", "another"):
        body = {"new_version": name, "abort_all_requests": False}
        assert ask(server, "POST", "/update_weight_version", body)["new_version"] == name
        stream.wait_for_tokens(stream.count + 3)
    stream.abort()
    spans = stream.output().meta["weight_versions"]
    assert [(span["version"], span["epoch"]) for span in spans] == [
        ("v0", epoch), ("a name", epoch), ("another", epoch)
    ]  # fmt: skip


def test_spans_are_exact_for_a_stop_string_from_the_new_weights(
    any_server: Server, checkpoints: Path
) -> None:
    """The stop string itself is cut from the text."""
    sampling = {"stop": [word(1)]}
    streams = start_running(any_server, 2, tokens=ENDLESS, sampling=sampling)
    (whole,) = start(any_server, 1, tokens=ENDLESS, sampling=sampling, stream=False)
    update(any_server, checkpoints, 1, non_blocking=True)
    for generation in (*streams, whole):
        output = generation.output()
        assert output.finish_reason == "stop"
        expect_spans(output)
        assert versions_of(output) in (["v0", "v1"], ["v1"])
        assert count_of(output, 1) == 1


def test_spans_are_exact_under_a_grammar(any_server: Server, checkpoints: Path) -> None:
    """The grammar masks each step by the earlier tokens."""
    words = "|".join(word(version) for version in range(6))
    sampling = {"regex": f"({words})*"}
    streams = start_running(any_server, 2, tokens=ENDLESS, sampling=sampling)
    update(any_server, checkpoints, 1, non_blocking=True)
    for output in expect_all_go_on(streams):
        assert versions_of(output) == ["v0", "v1"]


def test_openai_completions_have_exact_spans(any_server: Server, checkpoints: Path) -> None:
    body = {
        "model": "default",
        "prompt": prompt(),
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
    }
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(ask, any_server, "POST", "/v1/completions", body)
        until("it runs", lambda: status(any_server)["running"] == 1)
        update(any_server, checkpoints, 1, non_blocking=True)
        answer = asked.result()
    made_by = [f"v{int(said[1:]) - FIRST}" for said in answer["choices"][0]["text"].split()]
    labels = labels_of(answer["metadata"]["weight_versions"])
    assert labels == made_by
    assert set(labels) == {"v0", "v1"}


def test_spans_are_exact_over_a_hundred_updates_under_load(
    any_server: Server, checkpoints: Path
) -> None:
    """Updates follow each other at once, with every KV policy, while requests come and go."""
    policies = itertools.cycle(["fence", "keep", "recompute"])
    lasting, passing = start_running(any_server, 4, tokens=ENDLESS), []
    for turn, kv_cache in zip(range(1, 101), policies, strict=False):
        receipt = update(any_server, checkpoints, turn % 6, non_blocking=True, kv_cache=kv_cache)
        assert receipt["base_version"] == f"v{(turn - 1) % 6}"
        passing += start(any_server, 1, tokens=4, stream=turn % 2 == 0)
    for output in expect_all_go_on(lasting):
        assert (versions_of(output)[0], versions_of(output)[-1]) == ("v0", f"v{100 % 6}")
    for generation in passing:
        expect_whole(generation)


# ---- prefixes in the cache after an update ----------------------------------------------


def cached_tokens(server: Server, input_ids: list[int]) -> int:
    (generation,) = start(server, 1, tokens=2, input_ids=input_ids)
    cached: int = expect_whole(generation).meta["cached_tokens"]
    return cached


@pytest.mark.guards_fix
def test_no_prefix_of_older_weights_is_reused_after_a_pause(
    server: Server, checkpoints: Path
) -> None:
    """A frozen request prevents a flush of the cache."""
    input_ids = prompt(64)
    (running,) = start_running(server, 1, tokens=ENDLESS, input_ids=input_ids)
    assert cached_tokens(server, input_ids) > 0
    pause(server, "in_place")
    update(server, checkpoints, 1, flush_cache=False)
    resume(server)
    assert cached_tokens(server, input_ids) == 0
    assert cached_tokens(server, input_ids) > 0
    (output,) = expect_all_go_on([running])
    assert count_of(output, 1) > 0
    # the running request's KV of both versions must not stay in the cache
    update(server, checkpoints, 2, flush_cache=False)
    assert cached_tokens(server, input_ids) == 0


@pytest.mark.parametrize("kv", KV_FIELDS)
def test_prefixes_of_older_weights_are_reused_only_with_keep(
    any_server: Server, checkpoints: Path, kv: str
) -> None:
    input_ids = prompt(64)
    assert cached_tokens(any_server, input_ids) == 0
    assert cached_tokens(any_server, input_ids) > 0
    update(any_server, checkpoints, 1, non_blocking=True, **KV_FIELDS[kv])
    reused = cached_tokens(any_server, input_ids)
    assert (reused > 0) == (kv == "keep")
    assert cached_tokens(any_server, input_ids) > 0
