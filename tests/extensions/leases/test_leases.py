"""A lease keeps a conversation's KV until its next turn, and keeps it young in idle time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.server import Server
from tests.support import metrics
from tests.support.kv_runs import kv_runs
from tests.support.load import (
    ENDLESS,
    Output,
    ask,
    expect_whole,
    prompt,
    start,
    start_running,
    status,
    until,
    update,
)
from tests.support.pool import (
    CHUNK,
    FLAVOURS,
    MAX_RUNNING,
    Flavour,
    ServerPool,
    add_both_loops,
    empty,
)

POOL = 4096
LEASED = 1536
LENGTH = 600
LOOPS = add_both_loops("leases", Flavour(
    (
        "--chunked-prefill-size", str(CHUNK),
        "--max-running-requests", str(MAX_RUNNING),
        "--max-total-tokens", str(POOL),
        "--weight-version", "v0",
        "--enable-metrics",
    ),
    {"SGLANG_INFLIGHT_KV_LEASE_TOKENS": str(LEASED)},
))  # fmt: skip


@pytest.fixture(params=LOOPS)
def server(request: pytest.FixtureRequest, pool: ServerPool) -> Iterator[Server]:
    server = pool.get(FLAVOURS[request.param])
    yield server
    if server.is_alive():
        empty(server)
        end_leases(server)
    pool.restore()


def turn(
    server: Server, input_ids: list[int], seconds: float | None = 600, **fields: Any
) -> Output:
    custom = {} if seconds is None else {"kv_lease_s": seconds}
    (generation,) = start(
        server, 1, tokens=4, input_ids=input_ids, sampling={"custom_params": custom}, **fields
    )
    return expect_whole(generation)


def reused(server: Server, input_ids: list[int]) -> int:
    cached: int = turn(server, input_ids, None).meta["cached_tokens"]
    return cached


def leased(server: Server) -> float:
    return metrics.read(server)["leased_tokens"]


def renewed(server: Server) -> float:
    return metrics.read(server)["lease_refreshed_tokens_total"]


def end_leases(server: Server) -> None:
    """End a test's leases by one that takes the whole budget, and ends at once."""
    turn(server, prompt(LEASED - 3), 0.01)
    until("no lease is left", lambda: leased(server) == 0)


def fill(server: Server, times: int = 8) -> None:
    """Make SGLang evict all KV that nobody keeps."""
    for _ in range(times):
        expect_whole(start(server, 1, tokens=40, input_ids=prompt(LENGTH))[0])


def test_leased_kv_outlives_other_kv(server: Server) -> None:
    kept, other = prompt(LENGTH), prompt(LENGTH)
    turn(server, kept)
    turn(server, other, None)
    fill(server)
    assert leased(server) == LENGTH + 3
    assert reused(server, other) == 0
    assert reused(server, kept) == LENGTH - 1


def test_next_turns_lease_replaces_the_last_ones(server: Server) -> None:
    first = prompt(LENGTH)
    output = turn(server, first)
    second = [*first, *output.tokens, *prompt(20)]
    assert turn(server, second).meta["cached_tokens"] == LENGTH + 3
    assert leased(server) == len(second) + 3


def test_turn_under_another_salt_ends_no_lease(server: Server) -> None:
    conversation = prompt(LENGTH)
    for salt in ("a", "b"):
        turn(server, conversation, cache_salt=salt)
    assert leased(server) == 2 * (LENGTH + 3)


def test_oldest_leases_end_when_all_are_over_the_budget(server: Server) -> None:
    conversations = [prompt(LENGTH) for _ in range(4)]
    for each in conversations:
        turn(server, each)
    assert leased(server) == 2 * (LENGTH + 3)
    fill(server)
    assert [reused(server, each) for each in conversations[2:]] == 2 * [LENGTH - 1]
    assert reused(server, conversations[0]) == 0


def test_lease_ends_with_its_time(server: Server) -> None:
    turn(server, prompt(LENGTH), 0.2)
    until("the lease has ended", lambda: leased(server) == 0)


def test_leased_kv_is_computed_again_in_idle_time(server: Server, checkpoints: Path) -> None:
    conversation, before = prompt(LENGTH), renewed(server)
    turn(server, conversation)
    (busy,) = start_running(server, 1, tokens=ENDLESS)
    for version in (1, 2):
        update(server, checkpoints, version, non_blocking=True, kv_max_age=1)
    busy.wait_for_tokens(busy.count + 20)
    # there has been no idle time yet
    assert renewed(server) == before
    busy.abort()
    busy.wait_for_end()
    until("the KV is computed again", lambda: renewed(server) == before + LENGTH + 3)
    until("nothing runs", lambda: not status(server)["running"] and not status(server)["waiting"])
    output = turn(server, conversation, None)
    assert output.meta["cached_tokens"] == LENGTH - 1
    assert {version for version, _ in kv_runs(output)} == {"v2"}
    # the tokenizer knows nothing of it
    assert "inflight-lease" not in server.log_text()


def test_requests_meet_a_conversation_that_is_computed_again(
    server: Server, checkpoints: Path
) -> None:
    conversations = [prompt(LENGTH) for _ in range(2)]
    for each in conversations:
        turn(server, each)
    update(server, checkpoints, 1, non_blocking=True, kv_max_age=0)
    running = start_running(server, 4, tokens=100)
    ask(server, "POST", "/pause_generation", {"mode": "retract"})
    ask(server, "POST", "/continue_generation", {})
    for generation in running:
        assert len(expect_whole(generation).tokens) == 100
    ask(server, "POST", "/abort_request", {"abort_all": True})
    assert {version for version, _ in kv_runs(turn(server, conversations[0], None))} == {"v1"}


@pytest.mark.parametrize("seconds", [0, -1, "5", True, 1e9], ids=str)
def test_wrong_lease_is_a_400_that_names_it(server: Server, seconds: Any) -> None:
    body = {"input_ids": prompt(), "sampling_params": {"custom_params": {"kv_lease_s": seconds}}}
    answer = server.post("/generate", body)
    assert answer["status_code"] == 400
    assert "kv_lease_s must be a number of seconds" in str(answer)
