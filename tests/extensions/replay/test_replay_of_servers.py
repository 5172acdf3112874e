"""Rollouts of servers that retract, refresh, mix and pin, made again.

A CPU's matrix products depend on the batch in their last bits, so rollouts that ran beside others
are equal within a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.server import Server
from harness.starting import STEP_MS
from sglang_inflight.extensions.replay.examine import examine
from sglang_inflight.extensions.replay.play import added_prefills
from sglang_inflight.extensions.replay.rollout import Rollout
from tests.extensions.replay.test_replay import (
    DRAWN,
    FLAGS,
    GREEDY,
    LENGTH,
    LIVE,
    LOOPS,
    REPLAY,
    begin,
    build_first,
    cut,
    ended,
    make_stage,
)
from tests.support.load import (
    ENDLESS,
    ask,
    pause,
    prompt,
    resume,
    settle,
    until,
    until_made_by,
    update,
)
from tests.support.pool import CHUNK, FLAVOURS, Flavour, ServerPool

BESIDE_OTHERS = 0.05
INTERVAL = 12
BUDGET = 64
_PLAIN = Flavour(FLAGS, REPLAY, model=build_first)
FLAVOURS |= {
    "replay_short_of_memory": replace(
        _PLAIN,
        env={
            "SGLANG_TEST_RETRACT": "1",
            "SGLANG_TEST_RETRACT_INTERVAL": str(INTERVAL),
            # slow steps let rollouts of few tokens outlast an update
            STEP_MS: "20",
        },
    ),
    "replay_mixed": replace(_PLAIN, flags=(*FLAGS, "--enable-mixed-chunk")),
    "replay_soft": replace(
        _PLAIN,
        env={
            **REPLAY,
            "SGLANG_INFLIGHT_KV_REFRESH": "soft",
            "SGLANG_INFLIGHT_KV_REFRESH_TOKENS_PER_STEP": str(BUDGET),
        },
    ),
}


@pytest.fixture
def served(request: pytest.FixtureRequest, pool: ServerPool, versions: Path) -> Iterator[Server]:
    server = pool.get(FLAVOURS[request.param])
    update(server, versions, 0, kv_cache="recompute")
    yield server
    pool.restore()


def expect_again(server: Server, versions: Path, rollouts: list[Rollout], within: float) -> None:
    for stage in make_stage(server, versions):
        for rollout in rollouts:
            verdict = examine(stage, rollout, [], within).verdict
            assert verdict.is_equal, str(verdict)


def test_rollouts_retracted_for_want_of_memory_are_made_again(
    pool: ServerPool, versions: Path, tmp_path: Path
) -> None:
    server = pool.get(FLAVOURS["replay_short_of_memory"])
    update(server, versions, 0, kv_cache="recompute")
    generations = [begin(server, 50, DRAWN, prompt(LENGTH + i)) for i in range(3)]
    for generation in generations:
        generation.wait_for_tokens(3)
    update(server, versions, 1, kv_cache="keep", **LIVE)
    rollouts = [ended(generation, tmp_path) for generation in generations]
    pool.restore()
    assert sum(rollout.retractions for rollout in rollouts) > 0
    assert any(rollout.commits for rollout in rollouts)
    server = pool.get(FLAVOURS[LOOPS[0]])
    expect_again(server, versions, rollouts, BESIDE_OTHERS)
    pool.restore()


@pytest.mark.parametrize("served", ["replay_soft"], indirect=True)
def test_softly_refreshed_rollout_is_made_again(
    served: Server, versions: Path, tmp_path: Path
) -> None:
    length = 3 * BUDGET
    generation = begin(served, ENDLESS, input_ids=prompt(length))
    generation.wait_for_tokens(3)
    update(served, versions, 1, kv_max_age=0, **LIVE)
    until(
        "its old KV is recomputed",
        lambda: generation.output_so_far().meta["num_retractions"] == 1,
    )
    rollout = cut(generation, tmp_path)
    assert (rollout.commits, rollout.retractions) == (1, 1)
    chunks = [event[2] - event[1] for event in rollout.record.events if event[0] == "prefill"][1:]
    assert len(chunks) > 1
    assert max(chunks) <= BUDGET
    expect_again(served, versions, [rollout], 0.0)


@pytest.mark.parametrize("served", ["replay_mixed"], indirect=True)
def test_rollouts_of_mixed_chunks_are_made_again(
    served: Server, versions: Path, tmp_path: Path
) -> None:
    first = begin(served, ENDLESS, DRAWN)
    first.wait_for_tokens(3)
    # its chunks are computed beside steps of decoding
    second = begin(served, ENDLESS, DRAWN, prompt(3 * CHUNK))
    second.wait_for_tokens(3)
    update(served, versions, 1, kv_cache="keep", **LIVE)
    for generation in (first, second):
        until_made_by(generation, 1)
    rollouts = [cut(generation, tmp_path) for generation in (first, second)]
    assert [rollout.commits for rollout in rollouts] == [1, 1]
    expect_again(served, versions, rollouts, BESIDE_OTHERS)


@pytest.mark.parametrize("served", LOOPS, indirect=True)
def test_rollouts_that_share_recomputed_kv_are_made_again(
    served: Server, versions: Path, tmp_path: Path
) -> None:
    """After the commit the second one finds the prompt's KV, which the first one has recomputed."""
    input_ids = prompt(CHUNK + LENGTH)
    generations = [begin(served, ENDLESS, input_ids=input_ids) for _ in range(2)]
    for generation in generations:
        generation.wait_for_tokens(3)
    update(served, versions, 1, kv_cache="recompute", **LIVE)
    for generation in generations:
        until_made_by(generation, 1)
    rollouts = [cut(generation, tmp_path) for generation in generations]
    assert any(added_prefills(rollout) for rollout in rollouts)
    expect_again(served, versions, rollouts, BESIDE_OTHERS)


@pytest.mark.parametrize("served", LOOPS, indirect=True)
def test_pause_at_the_end_of_a_repetition_is_released(
    served: Server, versions: Path, tmp_path: Path
) -> None:
    rollout = ended(begin(served, 20), tmp_path)
    rollout.record.events.append(["commit", LENGTH + 19, 1])
    rollout.record.weights["1"] = ("v1", None)
    for stage in make_stage(served, versions):
        verdict = examine(stage, rollout, [], 0.0).verdict
        assert "event 1 was ['commit', 59], and nothing here" in str(verdict)
    assert not ask(served, "GET", "/inflight/status")["paused"]


@pytest.mark.parametrize("served", LOOPS, indirect=True)
@pytest.mark.parametrize("pinned", ["v0", "v1"])
def test_pinned_rollout_is_made_again(
    served: Server, versions: Path, tmp_path: Path, pinned: str
) -> None:
    """Version 0 is the previous one at the request's start, and version 1 then becomes it."""
    update(served, versions, 1, kv_cache="recompute", **LIVE)
    generation = begin(served, ENDLESS, {**GREEDY, "custom_params": {"weight_version": pinned}})
    generation.wait_for_tokens(3)
    if pinned == "v1":
        update(served, versions, 2, kv_cache="recompute", **LIVE)
        # the pause tells which tokens came before the commit
        pause(served, "in_place")
        (before,) = settle(served, [generation])
        resume(served)
        generation.wait_for_tokens(before + 3)
    rollout = cut(generation, tmp_path)
    assert {span.version for span in rollout.made_by} == {pinned}
    assert rollout.commits == 0
    assert rollout.record.version(rollout.record.epoch) == pinned
    expect_again(served, versions, [rollout], 0.0)
