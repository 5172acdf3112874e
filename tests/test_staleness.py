"""A request ends with its tokens when its first token is too many commits old."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.server import Server
from tests.support.load import (
    ENDLESS,
    ask,
    expect_aborted,
    expect_all_go_on,
    expect_whole,
    pause,
    resume,
    start,
    start_running,
    status,
    update,
    versions_of,
)
from tests.support.pool import MAX_VERSION_LAG


def limited(most: object) -> dict[str, Any]:
    return {"custom_params": {"max_version_lag": most}}


@pytest.mark.parametrize("kv", ["fence", "keep", "recompute"])
def test_request_past_max_version_lag_is_aborted(
    any_server: Server, checkpoints: Path, kv: str
) -> None:
    free = start_running(any_server, 1, tokens=ENDLESS)
    bound = start_running(any_server, 2, tokens=ENDLESS, sampling=limited(1))
    for version in (1, 2):
        assert not any(generation.has_ended for generation in bound)
        update(any_server, checkpoints, version, non_blocking=True, kv_cache=kv)
        free[0].wait_for_tokens(free[0].count + 3)
    for generation in bound:
        output = expect_aborted(generation)
        assert "max_version_lag is 1" in output.meta["finish_reason"]["message"]
        assert versions_of(output)[:2] == ["v0", "v1"]
    expect_all_go_on(free)


def test_aborting_commit_adds_no_token(server: Server, checkpoints: Path) -> None:
    """The next result under overlap still belongs to the old weights."""
    bound = start_running(server, 4, tokens=ENDLESS, sampling=limited(0))
    update(server, checkpoints, 1, non_blocking=True, kv_cache="fence")
    for generation in bound:
        assert versions_of(expect_aborted(generation)) == ["v0"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_retracted_request_is_aborted_before_it_is_recomputed(
    any_server: Server, checkpoints: Path, stream: bool
) -> None:
    """The abort comes during the pause, with all tokens."""
    (beside,) = start_running(any_server, 1, tokens=ENDLESS)
    (bound,) = start(any_server, 1, tokens=ENDLESS, stream=stream, sampling=limited(0))
    beside.wait_for_tokens(beside.count + 10)
    pause(any_server, "retract")
    update(any_server, checkpoints, 1, flush_cache=True)
    output = expect_aborted(bound)
    assert status(any_server)["paused"]
    assert len(output.tokens) > 3
    assert versions_of(output) == ["v0"]
    resume(any_server)
    expect_all_go_on([beside])


def test_waiting_request_without_tokens_does_not_age(any_server: Server, checkpoints: Path) -> None:
    pause(any_server, "in_place")
    waiting = start(any_server, 2, tokens=4, sampling=limited(0))
    for version in (1, 2, 3):
        update(any_server, checkpoints, version, flush_cache=False)
    resume(any_server)
    for generation in waiting:
        assert versions_of(expect_whole(generation)) == ["v3"]


def test_servers_max_version_lag_applies_by_default(off_server: Server, checkpoints: Path) -> None:
    bound = start_running(off_server, 1, tokens=ENDLESS)
    wider = start_running(off_server, 1, tokens=ENDLESS, sampling=limited(MAX_VERSION_LAG + 5))
    for version in range(1, MAX_VERSION_LAG + 2):
        update(off_server, checkpoints, version, non_blocking=True)
        wider[0].wait_for_tokens(wider[0].count + 3)
    output = expect_aborted(bound[0])
    assert f"max_version_lag is {MAX_VERSION_LAG}" in output.meta["finish_reason"]["message"]
    expect_all_go_on(wider)


@pytest.mark.parametrize("most", [-1, 1.5, "two", True, [1]])
def test_max_version_lag_that_is_no_count_is_refused(any_server: Server, most: object) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2, **limited(most)}}
    answer = any_server.post("/generate", body)
    assert answer["status_code"] == 400
    assert "max_version_lag" in str(answer)
    ask(any_server, "POST", "/generate", {**body, "sampling_params": {"max_new_tokens": 2}})
