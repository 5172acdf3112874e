"""A request that names a version of the weights has every token made by just these weights.

The marker's tokens name the weights that made them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.server import Server
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
from tests.support.pool import CHUNK

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
    for generation in start(any_server, 4, tokens=40, **pinned(0)):
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
    """The next update is staged over the previous version."""
    update(any_server, checkpoints, 1, **LIVE)
    running = start_running(any_server, 2, tokens=ENDLESS, **pinned(0))
    served = start_running(any_server, 1, tokens=ENDLESS, **pinned(1))
    pause(any_server, "in_place")
    waiting = start(any_server, 2, tokens=4, stream=False, **pinned(0))
    until_waiting(any_server, 2)
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
            any_server, 3, tokens=60, stream=True, **pinned(version - 1)
        )
        update(any_server, checkpoints, version, kv_cache="fence", **LIVE)
        for generation in bound:
            expect_only(expect_whole(generation), version - 1)
    expect_all_go_on(free)
