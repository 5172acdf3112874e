"""``kv_max_age``: KV is kept up to an age, and older KV is recomputed or left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.marker import FIRST
from harness.server import Server
from tests.support.kv_runs import kv_runs
from tests.support.load import (
    ENDLESS,
    Generation,
    ask,
    expect_aborted,
    expect_whole,
    pause,
    prompt,
    resume,
    start,
    start_running,
    status,
    until,
    update,
)

LENGTH = 64


def commit(server: Server, checkpoints: Path, version: int, **fields: Any) -> Any:
    return update(server, checkpoints, version, non_blocking=True, **fields)


def go_on(generations: list[Generation]) -> None:
    for generation in generations:
        generation.wait_for_tokens(generation.count + 3)


def end(generation: Generation) -> list[tuple[str, int]]:
    generation.abort()
    return kv_runs(expect_aborted(generation))


def with_bound(most: int | None) -> dict[str, Any]:
    return {} if most is None else {"custom_params": {"kv_max_age": most}}


def reused(server: Server, input_ids: list[int], **fields: Any) -> int:
    (generation,) = start(server, 1, tokens=2, input_ids=input_ids, **fields)
    cached: int = expect_whole(generation).meta["cached_tokens"]
    return cached


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_running_request_recomputes_kv_older_than_the_bound(
    any_server: Server, checkpoints: Path, most: int
) -> None:
    (generation,) = start_running(any_server, 1, tokens=ENDLESS)
    retracted = []
    for version in range(1, 5):
        receipt = commit(any_server, checkpoints, version, kv_max_age=most)
        retracted.append(receipt["retracted"])
        go_on([generation])
    # the KV begins anew at a retraction, and is too old again ``most + 1`` commits later
    assert retracted == [int(epoch % (most + 1) == 0) for epoch in range(1, 5)]
    last = max((epoch for epoch in range(1, 5) if epoch % (most + 1) == 0), default=0)
    versions = [version for version, _ in end(generation)]
    assert versions == [f"v{version}" for version in range(last, 5)]


@pytest.mark.parametrize("most", [0, 1, 2])
def test_prefix_is_reused_up_to_the_bound(any_server: Server, checkpoints: Path, most: int) -> None:
    input_ids = prompt(LENGTH)
    assert reused(any_server, input_ids) == 0
    for version in range(1, 4):
        commit(any_server, checkpoints, version, kv_max_age=most)
        # each look at the prefix is one at its oldest part
        assert reused(any_server, input_ids) == (LENGTH - 1 if version % (most + 1) else 0)


def test_lookup_takes_the_longest_prefix_and_of_equal_ones_the_youngest(
    any_server: Server, checkpoints: Path
) -> None:
    stem, tail = prompt(LENGTH), prompt(LENGTH)
    reused(any_server, [*stem, *tail])
    commit(any_server, checkpoints, 1, kv_max_age=2)
    # with 0 it finds nothing, and caches the stem anew
    assert reused(any_server, stem, sampling=with_bound(0)) == 0
    (short,) = start(any_server, 1, tokens=2, input_ids=[*stem, *prompt(4)])
    assert [version for version, _ in kv_runs(expect_whole(short))] == ["v1"]
    (long,) = start(any_server, 1, tokens=2, input_ids=[*stem, *tail])
    assert kv_runs(expect_whole(long))[0] == ("v0", 2 * LENGTH)


@pytest.mark.parametrize("policy", ["keep", "fence", 3])
def test_requests_own_bound_replaces_the_updates(
    any_server: Server, checkpoints: Path, policy: str | int
) -> None:
    fields = {"kv_max_age": policy} if isinstance(policy, int) else {"kv_cache": policy}
    bounds = (None, 0, 1)
    generations = [
        start_running(any_server, 1, tokens=ENDLESS, sampling=with_bound(most))[0]
        for most in bounds
    ]
    retracted = []
    for version in (1, 2):
        receipt = commit(any_server, checkpoints, version, **fields)
        retracted.append(receipt["retracted"])
        go_on(generations)
    assert retracted == [1, 2]
    oldest = {most: end(each)[0][0] for most, each in zip(bounds, generations, strict=True)}
    assert oldest == {None: "v0", 0: "v2", 1: "v2"}


def test_requests_own_bound_holds_for_prefixes(any_server: Server, checkpoints: Path) -> None:
    input_ids = prompt(LENGTH)
    reused(any_server, input_ids)
    commit(any_server, checkpoints, 1, kv_cache="fence")
    # the fence holds for requests without a bound
    assert reused(any_server, input_ids, sampling=with_bound(1)) == LENGTH - 1
    assert reused(any_server, input_ids) == 0
    commit(any_server, checkpoints, 2, kv_cache="keep")
    assert reused(any_server, input_ids, sampling=with_bound(0)) == 0
    assert reused(any_server, input_ids) == LENGTH - 1


def test_flush_leaves_nothing_for_a_bound(any_server: Server, checkpoints: Path) -> None:
    input_ids = prompt(LENGTH)
    reused(any_server, input_ids)
    commit(any_server, checkpoints, 1, kv_cache="recompute")
    assert reused(any_server, input_ids, sampling=with_bound(5)) == 0


@pytest.mark.parametrize(
    ("kv_cache", "of_salted", "of_others"),
    [("by_salt", LENGTH - 1, 0), ("fence", 0, 0), ("keep", LENGTH - 1, LENGTH - 1)],
)
def test_salted_prefix_outlives_a_commit_by_its_policy(
    any_server: Server, checkpoints: Path, kv_cache: str, of_salted: int, of_others: int
) -> None:
    input_ids = prompt(LENGTH)
    reused(any_server, input_ids)
    reused(any_server, input_ids, cache_salt="a")
    for version in (1, 2):
        commit(any_server, checkpoints, version, kv_cache=kv_cache)
    assert reused(any_server, input_ids, cache_salt="b") == 0
    assert reused(any_server, input_ids, cache_salt="a") == of_salted
    assert reused(any_server, input_ids) == of_others


def test_kv_is_as_old_after_a_rollback_as_after_a_commit(
    any_server: Server, checkpoints: Path
) -> None:
    (generation,) = start_running(any_server, 1, tokens=ENDLESS)
    commit(any_server, checkpoints, 1, kv_max_age=1)
    go_on([generation])
    back = ask(any_server, "POST", "/inflight/rollback", {"kv_max_age": 1})
    assert back["retracted"] == 1
    go_on([generation])
    assert [version for version, _ in end(generation)] == ["v0"]


def test_n_samples_of_a_request_recompute_their_kv(any_server: Server, checkpoints: Path) -> None:
    (group,) = start_running(any_server, 1, tokens=150, n=3, input_ids=prompt(LENGTH))
    receipt = commit(any_server, checkpoints, 1, kv_max_age=0)
    assert receipt["retracted"] == 3
    for output in group.outputs():
        assert [version for version, _ in kv_runs(output)] == ["v1"]
        assert set(output.tokens) == {FIRST, FIRST + 1}
        assert len(output.tokens) == 150


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kv_max_age": -1}, "kv_max_age"),
        ({"kv_max_age": "1"}, "kv_max_age"),
        ({"kv_max_age": 1, "kv_cache": "keep"}, "pass one"),
        ({"kv_cache": "young"}, "kv_cache"),
    ],
    ids=str,
)
def test_wrong_policy_is_a_400_that_names_it(
    any_server: Server, checkpoints: Path, fields: dict[str, Any], named: str
) -> None:
    body = {"model_path": str(checkpoints / "v1"), "weight_version": "v1", **fields}
    answer = any_server.post("/update_weights_from_disk", body)
    assert answer["status_code"] == 400
    assert named in answer["message"]


@pytest.mark.parametrize("most", [-1, 1.5, True, "2"], ids=str)
def test_wrong_bound_of_a_request_is_a_400_that_names_it(any_server: Server, most: Any) -> None:
    body = {"input_ids": prompt(), "sampling_params": {"custom_params": {"kv_max_age": most}}}
    answer = any_server.post("/generate", body)
    assert answer["status_code"] == 400
    assert "kv_max_age must be a whole number" in str(answer)


def test_beam_search_over_the_bound_begins_anew_beside_one_within_it(
    any_server: Server, checkpoints: Path
) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 150, "beam_width": 2}
    old, young = (
        Generation(
            any_server, tokens=150, input_ids=prompt(LENGTH), stream=False,
            sampling={**sampling, **with_bound(most)},
        )
        for most in (0, 9)
    )  # fmt: skip
    until("both run", lambda: status(any_server)["running"] == 2)
    frozen = pause(any_server, "in_place")["pause_id"]
    receipt = commit(any_server, checkpoints, 1, kv_cache="keep")
    assert receipt["retracted"] == 1
    resume(any_server, pause_id=frozen)
    assert {*old.output().tokens} == {FIRST + 1}
    assert {*young.output().tokens} == {FIRST, FIRST + 1}
    assert [each.output().meta["num_retractions"] for each in (old, young)] == [1, 0]


def test_recomputed_kv_is_cached_until_it_is_too_old(any_server: Server, checkpoints: Path) -> None:
    input_ids = prompt(LENGTH)
    (generation,) = start_running(any_server, 1, tokens=ENDLESS, input_ids=input_ids)
    commit(any_server, checkpoints, 1, kv_max_age=0)
    go_on([generation])
    commit(any_server, checkpoints, 2, kv_max_age=2)
    go_on([generation])
    generation.abort()
    output = expect_aborted(generation)
    asked = [*input_ids, *output.tokens[:-1]]
    assert reused(any_server, asked) == len(asked) - 1
