"""``kv_versions`` names the weights behind each cached position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.marker import FIRST
from harness.server import Server
from tests.support.kv_runs import kv_runs, kv_without_reuse, runs
from tests.support.load import (
    ENDLESS,
    expect_aborted,
    expect_all_go_on,
    expect_whole,
    pause,
    prompt,
    resume,
    start,
    start_running,
    until_waiting,
    update,
)
from tests.support.pool import CHUNK, SMALL_POOL

PIECE = SMALL_POOL // 10


@pytest.mark.parametrize("kv", ["fence", "keep", "recompute"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_kv_versions_are_exact_for_a_running_request(
    any_server: Server, checkpoints: Path, kv: str, stream: bool
) -> None:
    (asked,) = start(any_server, 1, tokens=ENDLESS, input_ids=prompt(40), stream=stream)
    (beside,) = start_running(any_server, 1, tokens=ENDLESS)
    for version in (1, 2):
        update(any_server, checkpoints, version, non_blocking=True, kv_cache=kv)
        beside.wait_for_tokens(beside.count + 3)
    asked.abort()
    output = expect_aborted(asked)
    if kv == "recompute":
        assert kv_runs(output) == [("v2", 40 + len(output.tokens) - 1)]
    else:
        assert kv_runs(output) == kv_without_reuse(output, 40)
        assert {version for version, _ in kv_runs(output)} == {"v0", "v1", "v2"}
    beside.abort()
    expect_aborted(beside)


def test_kv_versions_are_exact_across_an_update_while_paused(
    any_server: Server, checkpoints: Path
) -> None:
    """Frozen requests keep their KV; retracted requests get new KV."""
    generations = start_running(any_server, 2, tokens=ENDLESS)
    pause(any_server, "in_place")
    update(any_server, checkpoints, 1, flush_cache=False)
    resume(any_server)
    for generation in generations:
        generation.wait_for_tokens(generation.count + 3)
    pause(any_server, "retract")
    for generation in generations:
        assert not generation.has_ended
    resume(any_server)
    for output in expect_all_go_on(generations):
        assert kv_runs(output) == [("v1", 16 + len(output.tokens) - 1)]


@pytest.mark.parametrize("kv", ["fence", "keep", "recompute"])
def test_reused_prefix_keeps_its_kv_versions(
    any_server: Server, checkpoints: Path, kv: str
) -> None:
    input_ids = prompt(64)
    (first,) = start(any_server, 1, tokens=4, input_ids=input_ids)
    assert kv_runs(expect_whole(first)) == [("v0", 67)]
    update(any_server, checkpoints, 1, non_blocking=True, kv_cache=kv)
    (second,) = start(any_server, 1, tokens=4, input_ids=input_ids)
    output = expect_whole(second)
    reused = output.meta["cached_tokens"]
    if kv == "keep":
        # the prompt's last token is computed anew, but its cached KV stays, and later tokens attend
        # to the cached KV
        assert reused == 63
        assert kv_runs(output) == [("v0", 64), ("v1", 3)]
    else:
        assert reused == 0
        assert kv_runs(output) == [("v1", 67)]


def test_kv_that_new_weights_made_is_theirs_where_the_cache_holds_it_by_older_weights(
    any_server: Server, checkpoints: Path
) -> None:
    """At its end the request's own KV is given up for the cached KV of the same tokens."""
    forced = {"logit_bias": {str(FIRST): 500}}
    input_ids = prompt(64)
    (first,) = start(any_server, 1, tokens=40, input_ids=input_ids, sampling=forced)
    assert kv_runs(expect_whole(first)) == [("v0", 103)]
    update(any_server, checkpoints, 1, non_blocking=True, kv_cache="keep")
    (second,) = start(any_server, 1, tokens=20, input_ids=input_ids, sampling=forced)
    (third,) = start(any_server, 1, tokens=1, input_ids=input_ids, sampling=forced)
    assert second.output().meta["cached_tokens"] == 63
    assert kv_runs(second.output()) == [("v0", 64), ("v1", 19)]
    # no forward follows the prefill, which has read its own slot
    assert kv_runs(third.output()) == [("v0", 63), ("v1", 1)]
    # the cache keeps the KV that it has
    (again,) = start(any_server, 1, tokens=1, input_ids=[*input_ids, *[FIRST] * 19, *prompt(8)])
    assert kv_runs(expect_whole(again)) == [("v0", 83), ("v1", 8)]


def test_prefix_of_three_versions_keeps_its_kv_versions(
    any_server: Server, checkpoints: Path
) -> None:
    """Each prompt extends the previous one, and so adds its part to the cache."""
    input_ids = prompt(192)
    expected: list[Any] = []
    for version, length in ((0, 64), (1, 128), (2, 192)):
        if version:
            update(any_server, checkpoints, version, non_blocking=True, kv_cache="keep")
        (generation,) = start(any_server, 1, tokens=1, input_ids=input_ids[:length])
        output = expect_whole(generation)
        reused = output.meta["cached_tokens"]
        labels = [v for v, n in expected for _ in range(n)]
        assert len(labels) == reused
        expected = runs(labels + [f"v{version}"] * (length - reused))
        assert kv_runs(output) == expected
    assert [version for version, _ in expected] == ["v0", "v1", "v2"]


@pytest.mark.parametrize("kv", ["fence", "keep"])
def test_kv_versions_are_exact_across_a_commit_during_prefill(
    any_server: Server, checkpoints: Path, kv: str
) -> None:
    pause(any_server, "in_place")
    (prefilling,) = start(any_server, 1, tokens=2, input_ids=prompt(8 * CHUNK))
    until_waiting(any_server, 1)
    resume(any_server)
    (rank,) = pause(any_server, "in_place")["ranks"]
    assert (rank["running"], rank["waiting"]) == (1, 0)
    update(any_server, checkpoints, 1, non_blocking=True, kv_cache=kv)
    resume(any_server)
    output = expect_whole(prefilling)
    (old, before), (new, after) = kv_runs(output)
    assert (old, new) == ("v0", "v1")
    assert before % CHUNK == 0
    assert before + after == 8 * CHUNK + 1


def test_prefixes_behind_a_fence_are_evicted_first(off_server: Server, checkpoints: Path) -> None:
    """The prefix of a request across the commit is used later than some new prefixes, but must be
    evicted earlier. The pool has room for the new prefixes only.
    """
    across = start_running(off_server, 1, tokens=ENDLESS, input_ids=prompt(2 * PIECE))
    for _ in range(2):
        expect_whole(start(off_server, 1, tokens=1, input_ids=prompt(PIECE))[0])
    update(off_server, checkpoints, 1, non_blocking=True, kv_cache="fence")
    new = [prompt(PIECE) for _ in range(SMALL_POOL // PIECE - 1)]
    for input_ids in new[:2]:
        expect_whole(start(off_server, 1, tokens=1, input_ids=input_ids)[0])
    expect_all_go_on(across)
    for input_ids in new[2:]:
        expect_whole(start(off_server, 1, tokens=1, input_ids=input_ids)[0])
    for input_ids in new:
        (again,) = start(off_server, 1, tokens=1, input_ids=input_ids)
        assert expect_whole(again).meta["cached_tokens"] == PIECE - 1
