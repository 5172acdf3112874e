"""A request that names a version of the weights has every token made by just these weights.

The marker's tokens name the weights that made them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.server import Server, serve
from harness.starting import STEP_MS
from tests.support.kv_runs import kv_runs
from tests.support.load import (
    ENDLESS,
    Generation,
    expect_aborted,
    expect_all_go_on,
    expect_whole,
    more_tokens,
    pause,
    prompt,
    resume,
    start,
    start_running,
    status,
    until,
    until_waiting,
    update,
    versions_of,
)
from tests.support.plugins import with_plugin
from tests.support.pool import CHUNK, FLAVOURS, Flavour, ServerPool, add_both_loops
from tests.support.random_operations import act_at_random

# two ranks, and room for some 12 of the requests below
SMALL = add_both_loops(
    "small_ranks",
    Flavour(
        ("--tp-size", "2", "--max-total-tokens", "1024", "--max-running-requests", "12",
         "--weight-version", "v0"),
        {"SGLANG_INFLIGHT_PREVIOUS_EVERY": "2"},
    ),
)  # fmt: skip


FLAVOURS["small_hierarchical"] = Flavour(
    ("--enable-hierarchical-cache", "--max-total-tokens", "1024", "--hicache-ratio", "4",
     # the reference platform supports only these
     "--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first",
     "--max-running-requests", "12", "--weight-version", "v0"),
    with_plugin("host_memory"),
)  # fmt: skip


@pytest.fixture(params=[*SMALL, "small_hierarchical"])
def small_server(request: pytest.FixtureRequest, pool: ServerPool) -> Iterator[Server]:
    yield pool.get(FLAVOURS[request.param])
    pool.restore()


LIVE: dict[str, Any] = {"non_blocking": True}


def pinned(version: int) -> dict[str, Any]:
    return {"sampling": {"custom_params": {"weight_version": f"v{version}"}}}


def expect_only(output: Any, version: int) -> None:
    assert versions_of(output) == [f"v{version}"]
    assert {name for name, _ in kv_runs(output)} == {f"v{version}"}


@pytest.mark.parametrize("kv", ["fence", "keep", "recompute"])
def test_pinned_requests_keep_the_weights_they_began_with(
    any_server: Server, checkpoints: Path, kv: str
) -> None:
    free = start_running(any_server, 2, tokens=ENDLESS)
    bound = start_running(any_server, 2, tokens=ENDLESS, **pinned(0))
    update(any_server, checkpoints, 1, kv_cache=kv, **LIVE)
    more_tokens([*free, *bound])
    later = start_running(any_server, 1, tokens=ENDLESS, **pinned(1))
    former = start_running(any_server, 1, tokens=ENDLESS, **pinned(0))
    for output in expect_all_go_on([*bound, *former]):
        expect_only(output, 0)
    for output in expect_all_go_on(later):
        expect_only(output, 1)
    for output in expect_all_go_on(free):
        assert versions_of(output) == ["v0", "v1"]


def test_all_requests_pinned_go_on_without_recompute(any_server: Server, checkpoints: Path) -> None:
    bound = start_running(any_server, 4, tokens=ENDLESS, **pinned(0))
    receipt = update(any_server, checkpoints, 1, kv_cache="fence", **LIVE)
    assert receipt["retracted"] == 0
    more_tokens(bound)
    assert status(any_server)["pinned_to_previous"] == 4
    for output in expect_all_go_on(bound):
        expect_only(output, 0)
        assert not output.meta.get("num_retractions")


def test_pinned_request_is_whole_beside_others(any_server: Server, checkpoints: Path) -> None:
    update(any_server, checkpoints, 1, **LIVE)
    beside = start_running(any_server, 3, tokens=ENDLESS)
    for generation in start(any_server, 4, tokens=16, **pinned(0)):
        expect_only(expect_whole(generation), 0)
    for output in expect_all_go_on(beside):
        assert versions_of(output) == ["v1"]


def test_pinned_prompt_in_chunks(any_server: Server, checkpoints: Path) -> None:
    update(any_server, checkpoints, 1, **LIVE)
    beside = start_running(any_server, 2, tokens=ENDLESS)
    long = start(any_server, 3, tokens=8, input_ids=prompt(3 * CHUNK + 7), **pinned(0))
    served = start(any_server, 3, tokens=8, input_ids=prompt(3 * CHUNK + 7))
    for generation in long:
        expect_only(expect_whole(generation), 0)
    for generation in served:
        expect_only(expect_whole(generation), 1)
    expect_all_go_on(beside)


def test_rollback_returns_to_the_pinned_weights(any_server: Server, checkpoints: Path) -> None:
    update(any_server, checkpoints, 1, **LIVE)
    old = start_running(any_server, 2, tokens=ENDLESS, **pinned(0))
    new = start_running(any_server, 2, tokens=ENDLESS, **pinned(1))
    free = start_running(any_server, 1, tokens=ENDLESS)
    for _ in range(3):
        any_server.post("/inflight/rollback", {"kv_cache": "fence"})
        more_tokens([*old, *new, *free])
    for output in expect_all_go_on(old):
        expect_only(output, 0)
    for output in expect_all_go_on(new):
        expect_only(output, 1)
    (output,) = expect_all_go_on(free)
    assert versions_of(output) == ["v1", "v0", "v1", "v0"]


def test_unknown_version_is_a_conflict(any_server: Server, checkpoints: Path) -> None:
    (generation,) = start(any_server, 1, tokens=4, stream=False, **pinned(7))
    generation.wait_for_end()
    assert generation.status == 409, generation.refusal
    assert "'v7'" in str(generation.refusal)
    assert "'v0'" in str(generation.refusal)


def test_lost_version_ends_its_requests(any_server: Server, checkpoints: Path) -> None:
    """The next update is staged over the previous version. A request may wait for its grammar."""
    in_grammar_queue = pinned(0)
    in_grammar_queue["sampling"] |= {"regex": "(a|b|c|e)+"}
    update(any_server, checkpoints, 1, **LIVE)
    running = start_running(any_server, 2, tokens=ENDLESS, **pinned(0))
    served = start_running(any_server, 1, tokens=ENDLESS, **pinned(1))
    pause(any_server, "in_place")
    waiting = start(any_server, 2, tokens=4, stream=False, **pinned(0))
    waiting += start(any_server, 1, tokens=4, stream=False, **in_grammar_queue)
    until_waiting(any_server, 3)
    update(any_server, checkpoints, 2, kv_cache="fence", **LIVE)
    for generation in waiting:
        generation.wait_for_end()
        assert generation.status == 503, generation.refusal
        assert "lost the weights 'v0'" in str(generation.refusal)
    for generation in running:
        output = expect_aborted(generation)
        assert versions_of(output) == ["v0"]
        assert "lost the weights 'v0'" in output.meta["finish_reason"]["message"]
    resume(any_server)
    for output in expect_all_go_on(served):
        expect_only(output, 1)
    (late,) = start(any_server, 1, tokens=4, stream=False, **pinned(0))
    late.wait_for_end()
    assert late.status == 409, late.refusal


@pytest.mark.parametrize("mode", ["in_place", "retract", "wait"])
def test_pause_holds_both_versions(any_server: Server, checkpoints: Path, mode: str) -> None:
    update(any_server, checkpoints, 1, **LIVE)
    tokens = 60 if mode == "wait" else ENDLESS
    old = start_running(any_server, 2, tokens=tokens, **pinned(0))
    new = start_running(any_server, 2, tokens=tokens)
    pause(any_server, mode)
    waiting = start(any_server, 1, tokens=4, **pinned(0))
    until_waiting(any_server, 1 + (4 if mode == "retract" else 0))
    resume(any_server)
    expect_only(expect_whole(waiting[0]), 0)
    end = expect_all_go_on if mode != "wait" else lambda gs: [expect_whole(g) for g in gs]
    for output in end(old):
        expect_only(output, 0)
    for output in end(new):
        expect_only(output, 1)


def test_pinned_request_reuses_no_prefix_of_other_weights(
    any_server: Server, checkpoints: Path
) -> None:
    input_ids = prompt(64)
    expect_whole(start(any_server, 1, tokens=4, input_ids=input_ids)[0])
    update(any_server, checkpoints, 1, kv_cache="keep", **LIVE)
    for version in (0, 1):
        fresh, again = (
            expect_whole(start(any_server, 1, tokens=4, input_ids=input_ids, **pinned(version))[0])
            for _ in range(2)
        )
        expect_only(fresh, version)
        expect_only(again, version)
        assert fresh.meta["cached_tokens"] == 0
        assert again.meta["cached_tokens"] > 0


def test_abort_reaches_requests_of_the_parked_version(
    any_server: Server, checkpoints: Path
) -> None:
    update(any_server, checkpoints, 1, **LIVE)
    old = start_running(any_server, 2, tokens=ENDLESS, **pinned(0))
    new = start_running(any_server, 2, tokens=ENDLESS)
    pause(any_server, "in_place")
    for generation in (*old, *new):
        generation.abort()
    resume(any_server)
    for generation in (*old, *new):
        expect_aborted(generation)
    until("the server is idle", lambda: not status(any_server)["running"])


def test_two_versions_survive_many_commits(any_server: Server, checkpoints: Path) -> None:
    """Rollouts end under the policy they began with, while commits follow each other."""
    free = start_running(any_server, 1, tokens=ENDLESS)
    for version in range(1, 5):
        bound: list[Generation] = start_running(
            any_server, 3, tokens=30, stream=True, **pinned(version - 1)
        )
        update(any_server, checkpoints, version, kv_cache="fence", **LIVE)
        for generation in bound:
            expect_only(expect_whole(generation), version - 1)
    expect_all_go_on(free)


def test_pin_at_the_top_level_of_a_body(any_server: Server, checkpoints: Path) -> None:
    update(any_server, checkpoints, 1, **LIVE)
    (generation,) = start(any_server, 1, tokens=4, weight_version="v0")
    expect_only(expect_whole(generation), 0)
    (unknown,) = start(any_server, 1, tokens=4, stream=False, weight_version="v7")
    unknown.wait_for_end()
    assert unknown.status == 409, unknown.refusal


def test_samples_of_one_prompt_share_the_pin(any_server: Server, checkpoints: Path) -> None:
    update(any_server, checkpoints, 1, **LIVE)
    beside = start_running(any_server, 1, tokens=ENDLESS)
    (generation,) = start(any_server, 1, tokens=20, n=3, **pinned(0))
    for output in generation.outputs():
        assert output.finish_reason == "length"
        expect_only(output, 0)
    expect_all_go_on(beside)


def test_pin_waits_for_its_grammar(any_server: Server, checkpoints: Path) -> None:
    """The version is looked up at arrival, and a grammar is compiled later."""
    update(any_server, checkpoints, 1, **LIVE)
    beside = start_running(any_server, 1, tokens=ENDLESS)
    bodies = pinned(0)
    bodies["sampling"] |= {"regex": "(a|b|c|d)+", "ignore_eos": True}
    (generation,) = start(any_server, 1, tokens=8, **bodies)
    output = generation.output()
    assert versions_of(output) == ["v0"], output.meta
    expect_all_go_on(beside)


def test_session_cannot_be_pinned(any_server: Server, checkpoints: Path) -> None:
    (generation,) = start(any_server, 1, tokens=4, stream=False, session_id="s", **pinned(0))
    generation.wait_for_end()
    assert generation.status == 400
    assert "session" in str(generation.refusal)


def test_no_request_is_lost_where_memory_is_short(small_server: Server, checkpoints: Path) -> None:
    """Each version has one request, and both outgrow the pool: SGLang would end the last one."""
    update(small_server, checkpoints, 1, **LIVE)
    (new,) = start_running(small_server, 1, tokens=80, input_ids=prompt(850))
    (old,) = start_running(small_server, 1, tokens=50, input_ids=prompt(90), **pinned(0))
    assert not new.has_ended
    expect_only(expect_whole(new), 1)
    expect_only(expect_whole(old), 0)


def test_busy_server_does_not_starve_the_previous_version(
    small_server: Server, checkpoints: Path
) -> None:
    """Newcomers of the served version would take all room that becomes free."""
    update(small_server, checkpoints, 1, **LIVE)
    flood = [
        start(small_server, 1, tokens=20 + 4 * (index % 9), stream=False)[0] for index in range(36)
    ]
    (old,) = start(small_server, 1, tokens=10, input_ids=prompt(700), **pinned(0))
    expect_only(expect_whole(old), 0)
    # a starved request would find room beside the last five
    assert sum(not generation.has_ended for generation in flood) > 10
    for generation in flood:
        expect_only(expect_whole(generation), 1)


def test_ranks_agree_under_random_operations(small_server: Server, checkpoints: Path) -> None:
    act_at_random(small_server, checkpoints, 100)


def test_update_waits_for_the_previous_version(checkpoints: Path, tmp_path: Path) -> None:
    """The next update begins after the pinned requests have ended, not after the longer others."""
    # slow steps let few tokens outlast an update
    env = {"SGLANG_INFLIGHT_PREVIOUS_GRACE_S": "60", STEP_MS: "30"}
    with serve(
        checkpoints / "v0", "--weight-version", "v0", log=tmp_path / "log", env=env
    ) as server:
        (free,) = start_running(server, 1, tokens=ENDLESS)
        bound = start_running(server, 2, tokens=80, **pinned(0))
        update(server, checkpoints, 1, **LIVE)
        assert not any(generation.has_ended for generation in bound)
        update(server, checkpoints, 2, **LIVE)
        for generation in bound:
            expect_only(expect_whole(generation), 0)
        (output,) = expect_all_go_on([free])
        assert versions_of(output) == ["v0", "v1", "v2"]
