"""Old KV is recomputed within a budget, beside decoding, and no request loses anything by it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.marker import FIRST
from harness.server import Server
from harness.starting import STEP_MS
from tests.support import metrics
from tests.support.kv_runs import kv_runs
from tests.support.load import (
    ENDLESS,
    Generation,
    ask,
    expect_aborted,
    expect_all_go_on,
    expect_whole,
    pause,
    prompt,
    resume,
    start,
    start_running,
    status,
    until,
    until_waiting,
    update,
)
from tests.support.pool import CHUNK, FLAVOURS, MAX_RUNNING, Flavour, ServerPool, add_both_loops

BUDGET = 32
LENGTH = 100
_FLAGS = (
    "--chunked-prefill-size", str(CHUNK),
    "--max-running-requests", str(MAX_RUNNING),
    "--weight-version", "v0",
    "--enable-metrics",
)  # fmt: skip
# tokens of a request that outlasts a commit
TOKENS = 150
_BUDGET = {"SGLANG_INFLIGHT_KV_REFRESH_TOKENS_PER_STEP": str(BUDGET)}
# slow steps let requests outlast calls, and cost less than more tokens
_SLOW = {**_BUDGET, STEP_MS: "15"}
SOFT = add_both_loops(
    "soft_refresh", Flavour(_FLAGS, {**_SLOW, "SGLANG_INFLIGHT_KV_REFRESH": "soft"})
)
FLAVOURS["soft_refresh_tp"] = Flavour(
    (*_FLAGS, "--tp-size", "2"), {**_BUDGET, "SGLANG_INFLIGHT_KV_REFRESH": "soft"}
)
SHORT = 1024
for _name in ("soft", "hard"):
    FLAVOURS[f"{_name}_refresh_short"] = Flavour(
        # SGLang then runs all requests of a test at once, if it may expect that they end early
        (*_FLAGS, "--max-total-tokens", str(SHORT), "--schedule-conservativeness", "0.2"),
        {**_BUDGET, "SGLANG_INFLIGHT_KV_REFRESH": _name},
    )
HARD = add_both_loops("hard_refresh", Flavour(_FLAGS, {**_SLOW, "SGLANG_INFLIGHT_KV_MAX_AGE": "0"}))


@pytest.fixture(params=[*SOFT, *HARD])
def server(request: pytest.FixtureRequest, pool: ServerPool) -> Iterator[Server]:
    yield pool.get(FLAVOURS[request.param])
    pool.restore()


@pytest.fixture(params=SOFT)
def soft(request: pytest.FixtureRequest, pool: ServerPool) -> Iterator[Server]:
    yield pool.get(FLAVOURS[request.param])
    pool.restore()


@pytest.fixture(params=HARD)
def hard(request: pytest.FixtureRequest, pool: ServerPool) -> Iterator[Server]:
    yield pool.get(FLAVOURS[request.param])
    pool.restore()


def begin(server: Server, n: int, **fields: Any) -> list[Generation]:
    """Start requests with prompts of their own."""
    return [
        start_running(server, 1, tokens=ENDLESS, input_ids=prompt(LENGTH), **fields)[0]
        for _ in range(n)
    ]


def commit(server: Server, checkpoints: Path, version: int, **fields: Any) -> Any:
    return update(server, checkpoints, version, non_blocking=True, **fields)


def until_refreshed(server: Server, tokens: float, before: float) -> None:
    until(
        "old KV is recomputed",
        lambda: metrics.read(server)["refreshed_tokens_total"] - before >= tokens,
    )


def refreshed(server: Server) -> float:
    return metrics.read(server)["refreshed_tokens_total"]


def prefills(server: Server, since: int) -> list[int]:
    """Return the new tokens of each prefill in the log after its first ``since`` characters."""
    log = server.log_text()[since:]
    return [int(new) for new in re.findall(r"Prefill batch.*?#new-token: (\d+)", log)]


def expect_only(version: str, generation: Generation) -> None:
    generation.abort()
    output = expect_aborted(generation)
    # KV of each position: a prompt of which only a chunk was computed lacks some
    assert kv_runs(output) == [(version, LENGTH + len(output.tokens) - 1)]


def test_steps_recompute_no_more_than_the_budget(server: Server, checkpoints: Path) -> None:
    generations = begin(server, 4)
    before, since = refreshed(server), len(server.log_text())
    commit(server, checkpoints, 1, kv_max_age=0)
    until_refreshed(server, 4 * LENGTH, before)
    for generation in generations:
        generation.wait_for_tokens(generation.count + 3)
    assert not status(server)["waiting"]
    counted = refreshed(server) - before
    steps = prefills(server, since)
    assert max(steps) <= BUDGET
    assert sum(steps) == counted
    for generation in generations:
        expect_only("v1", generation)


def test_others_decode_while_old_kv_is_recomputed(server: Server, checkpoints: Path) -> None:
    """A step of decoding follows each of recomputing, so the other has as many tokens as steps."""
    (other,) = begin(server, 1, sampling={"custom_params": {"kv_max_age": 9}})
    generations = begin(server, 4)
    since, before, count = len(server.log_text()), refreshed(server), other.count
    commit(server, checkpoints, 1, kv_max_age=0)
    until_refreshed(server, 4 * LENGTH, before)
    steps = len(prefills(server, since))
    assert steps >= 4 * LENGTH // BUDGET
    other.wait_for_tokens(count + steps)
    other.abort()
    output = expect_aborted(other)
    assert output.meta["num_retractions"] == 0
    for generation in generations:
        expect_only("v1", generation)


def test_soft_goes_on_with_old_kv_until_its_turn(soft: Server, checkpoints: Path) -> None:
    generations = begin(soft, 4)
    frozen = pause(soft, "in_place")["pause_id"]
    receipt = commit(soft, checkpoints, 1, kv_max_age=0)
    # a frozen loop retracts nobody
    assert receipt["retracted"] == 0
    assert (status(soft)["running"], status(soft)["waiting"]) == (4, 0)
    before = refreshed(soft)
    resume(soft, pause_id=frozen)
    until_refreshed(soft, 4 * LENGTH, before)
    for generation in generations:
        expect_only("v1", generation)


def test_hard_makes_no_token_with_old_kv(hard: Server, checkpoints: Path) -> None:
    """The setting is the policy of a call that names none."""
    generations = begin(hard, 4)
    assert commit(hard, checkpoints, 1)["retracted"] == 4
    for generation in generations:
        generation.wait_for_tokens(generation.count + 3)
    assert commit(hard, checkpoints, 2, kv_cache="keep")["retracted"] == 0
    for output in expect_all_go_on(generations):
        assert {made_by for made_by, _ in kv_runs(output)} == {"v1", "v2"}
        assert output.meta["num_retractions"] == 1


def test_setting_is_the_policy_of_a_session_that_names_none(
    hard: Server, checkpoints: Path
) -> None:
    generations = begin(hard, 2)
    opened = ask(hard, "POST", "/begin_weight_update", {"non_blocking": True})
    named = {"session_id": opened["session_id"], "non_blocking": True}
    update(hard, checkpoints, 1, **named)
    ended = {**named, "flush_cache": False, "weight_version": "v1"}
    assert ask(hard, "POST", "/end_weight_update", ended)["retracted"] == 2
    expect_all_go_on(generations)


def test_samples_of_a_prompt_recompute_it_once(server: Server, checkpoints: Path) -> None:
    (group,) = start_running(server, 1, tokens=TOKENS, n=4, input_ids=prompt(LENGTH))
    before = refreshed(server)
    commit(server, checkpoints, 1, kv_max_age=0)
    for output in group.outputs():
        assert len(output.tokens) == TOKENS
        assert [made_by for made_by, _ in kv_runs(output)] == ["v1"]
        assert output.meta["num_retractions"] == 1
    own = sum(sum(token == FIRST for token in output.tokens) for output in group.outputs())
    assert refreshed(server) - before < 2 * LENGTH + own


def test_request_longer_than_its_prompts_chunks_is_whole(server: Server, checkpoints: Path) -> None:
    """The output so far is longer than the prompt, and both take several chunks."""
    (generation,) = start_running(server, 1, tokens=3 * BUDGET + TOKENS, at_least=3 * BUDGET)
    commit(server, checkpoints, 1, kv_max_age=0)
    output = expect_whole(generation)
    assert len(output.tokens) == 3 * BUDGET + TOKENS
    assert output.tokens == sorted(output.tokens)
    assert [made_by for made_by, _ in kv_runs(output)] == ["v1"]


def test_abort_and_pause_meet_a_half_recomputed_request(server: Server, checkpoints: Path) -> None:
    generations = begin(server, 4)
    before = refreshed(server)
    commit(server, checkpoints, 1, kv_max_age=0)
    until_refreshed(server, BUDGET, before)
    first, *others = generations
    first.abort()
    expect_aborted(first)
    pause(server, "retract")
    resume(server)
    for generation in others:
        generation.wait_for_tokens(generation.count + 3)
        expect_only("v1", generation)


def test_aborted_beam_search_keeps_nobody_waiting(hard: Server, checkpoints: Path) -> None:
    """SGLang takes it from the queue, and does not finish it."""
    (searching,) = start(
        hard, 1, tokens=4000, input_ids=prompt(LENGTH), stream=False, sampling={"beam_width": 2}
    )
    until("it runs", lambda: status(hard)["running"] == 1)
    generations = begin(hard, 2)
    frozen = pause(hard, "in_place")["pause_id"]
    assert commit(hard, checkpoints, 1, kv_max_age=0)["retracted"] == 3
    searching.abort()
    searching.wait_for_end()
    resume(hard, pause_id=frozen)
    for generation in generations:
        generation.wait_for_tokens(generation.count + 3)
        expect_only("v1", generation)


def test_newcomers_begin_while_old_kv_is_recomputed(server: Server, checkpoints: Path) -> None:
    generations = begin(server, 4)
    before = refreshed(server)
    commit(server, checkpoints, 1, kv_max_age=0)
    (newcomer,) = start_running(server, 1, tokens=4, input_ids=prompt(LENGTH))
    output = expect_whole(newcomer)
    assert [made_by for made_by, _ in kv_runs(output)] == ["v1"]
    until_refreshed(server, 4 * LENGTH, before)
    for generation in generations:
        expect_only("v1", generation)


def test_newcomer_of_several_chunks_waits_for_the_chunk_of_another(
    server: Server, checkpoints: Path
) -> None:
    """A step with two unfinished prompts would end the scheduler."""
    generations = begin(server, 2)
    frozen = pause(server, "in_place")["pause_id"]
    retracted = commit(server, checkpoints, 1, kv_max_age=0)["retracted"]
    newcomers = start(server, 2, tokens=4, input_ids=prompt(3 * CHUNK))
    until_waiting(server, retracted + 2)
    resume(server, pause_id=frozen)
    for newcomer in newcomers:
        output = expect_whole(newcomer)
        assert [made_by for made_by, _ in kv_runs(output)] == ["v1"]
    for generation in generations:
        generation.wait_for_tokens(generation.count + 3)
        expect_only("v1", generation)


def test_commits_faster_than_the_recomputation_starve_nobody(
    server: Server, checkpoints: Path
) -> None:
    generations = begin(server, 4)
    for version in (1, 2, 3, 4, 5):
        commit(server, checkpoints, version, kv_max_age=1)
    for generation in generations:
        generation.wait_for_tokens(generation.count + 20)
    for output in expect_all_go_on(generations):
        assert {made_by for made_by, _ in kv_runs(output)} <= {"v4", "v5"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("KV_REFRESH", "later"), ("KV_REFRESH_TOKENS_PER_STEP", "0"), ("KV_MAX_AGE", "-1")],
)
def test_wrong_setting_is_named_at_the_start(name: str, value: str) -> None:
    from sglang_inflight.extensions.refresh import RefreshSettings
    from sglang_inflight.settings import Settings, read
    from sglang_inflight.vocabulary.errors import BadSetting

    for kind in (Settings, RefreshSettings):
        with pytest.raises(BadSetting, match=f"SGLANG_INFLIGHT_{name}"):
            read(kind, {f"SGLANG_INFLIGHT_{name}": value})


def test_status_says_whether_ages_are_possible(server: Server) -> None:
    assert status(server)["capabilities"]["kv_max_age"] is None


@pytest.fixture
def two_ranks(pool: ServerPool) -> Iterator[Server]:
    yield pool.get(FLAVOURS["soft_refresh_tp"])
    pool.restore()


def test_both_ranks_recompute_the_same_requests(two_ranks: Server, checkpoints: Path) -> None:
    """Ranks that chose differently would compute different batches, and hang."""
    generations = begin(two_ranks, 6)
    for version in (1, 2, 3, 4, 5):
        commit(two_ranks, checkpoints, version, kv_max_age=1)
        generations[0].wait_for_tokens(generations[0].count + 5)
    for output in expect_all_go_on(generations):
        assert output.meta["num_retractions"] >= 1


@pytest.fixture(params=["soft", "hard"])
def short_of_memory(request: pytest.FixtureRequest, pool: ServerPool) -> Iterator[Server]:
    yield pool.get(FLAVOURS[f"{request.param}_refresh_short"])
    pool.restore()


def test_requests_that_memory_retracts_too_lose_no_token(
    short_of_memory: Server, checkpoints: Path
) -> None:
    """All requests together want twice the memory there is."""
    since = len(short_of_memory.log_text())
    fields: Any = {"tokens": SHORT // 4, "sampling": {"ignore_eos": False}}
    generations = [
        start_running(short_of_memory, 1, input_ids=prompt(LENGTH), **fields)[0] for _ in range(6)
    ]
    for version in (1, 2, 3, 4, 5):
        commit(short_of_memory, checkpoints, version, kv_max_age=1)
        generations[0].wait_for_tokens(min(SHORT // 4, generations[0].count + 20))
    for generation in generations:
        output = expect_whole(generation)
        assert len(output.tokens) == SHORT // 4
        assert output.tokens == sorted(output.tokens)
    assert "KV cache pool is full. Retract requests." in short_of_memory.log_text()[since:]
