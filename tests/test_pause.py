"""The contract of each pause mode, on a real server."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.server import Server, schedulers
from harness.starting import UPSTREAM
from tests.support.load import (
    ENDLESS,
    PATIENCE_S,
    Generation,
    count_of,
    expect_aborted,
    expect_all_go_on,
    expect_whole,
    pass_boundaries,
    pause,
    prompt,
    resume,
    settle,
    start,
    start_running,
    status,
    until,
    until_waiting,
)
from tests.support.pool import (
    CHUNK,
    MAX_QUEUED,
    MAX_RUNNING,
    WAITING_TIMEOUT_S,
    outlast_watchdog,
)

MODES = ("in_place", "retract", "abort", "wait")
# length of requests meant to finish
TOKENS = 120
COUNTS = ("running", "waiting", "retracted", "aborted")
_grammars = itertools.count()


@dataclass
class Situation:
    """The scheduler's requests when the pause comes."""

    running: list[Generation] = field(default_factory=list)
    prefilling: list[Generation] = field(default_factory=list)
    waiting: list[Generation] = field(default_factory=list)

    @property
    def admitted(self) -> list[Generation]:
        return self.running + self.prefilling

    @property
    def all(self) -> list[Generation]:
        return self.admitted + self.waiting


def nothing(server: Server, tokens: int) -> Situation:
    return Situation()


def running(server: Server, tokens: int) -> Situation:
    return Situation(running=start_running(server, 4, tokens=tokens))


def waiting(server: Server, tokens: int) -> Situation:
    there = Situation(running=start_running(server, MAX_RUNNING, tokens=tokens))
    there.waiting = start(server, 3, tokens=tokens)
    until_waiting(server, 3)
    return there


def mid_prefill(server: Server, tokens: int) -> Situation:
    """Start a long prompt's prefill, with some steps to go."""
    there = Situation(running=start_running(server, 2, tokens=tokens))
    pause(server, "in_place")
    there.prefilling = start(server, 1, tokens=tokens, input_ids=prompt(8 * CHUNK))
    until_waiting(server, 1)
    resume(server)
    return there


@pytest.mark.parametrize("situation", [nothing, running, waiting, mid_prefill])
@pytest.mark.parametrize("mode", MODES)
def test_pause_counts_and_freezes_requests_by_mode(
    server: Server, mode: str, situation: Callable[[Server, int], Situation]
) -> None:
    there = situation(server, TOKENS if mode == "wait" else ENDLESS)
    answer = pause(server, mode)
    (rank,) = answer.pop("ranks")
    seen = settle(server, there.all)

    assert answer.pop("pause_id")
    assert answer == {
        "status": "ok",
        "message": "Generation paused successfully.",
        "paused": True,
        "mode": mode,
        "weight_version": "v0",
    }
    admitted, queued = len(there.admitted), len(there.waiting)
    expected = {
        "in_place": (admitted, queued, 0, 0),
        "retract": (0, admitted + queued, admitted, 0),
        "abort": (0, 0, 0, admitted + queued),
        "wait": (0, queued, 0, 0),
    }[mode]
    assert rank == {
        "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, **dict(zip(COUNTS, expected, strict=True))
    }  # fmt: skip
    now = status(server)
    assert (now["running"], now["waiting"]) == expected[:2]
    assert (now["paused"], now["state"], now["mode"]) == (True, "frozen", mode)

    if mode == "abort":
        for generation in there.all:
            expect_aborted(generation)
        for generation in there.running:
            assert generation.count > 0, "an aborted request keeps the tokens it has"
    elif mode == "wait":
        for generation in there.admitted:
            expect_whole(generation)
        assert not any(generation.count for generation in there.waiting)
    else:
        assert not any(generation.has_ended for generation in there.all)
        assert not any(generation.count for generation in there.prefilling + there.waiting)
        assert all(generation.count for generation in there.running)
    pass_boundaries(server)
    assert [generation.count for generation in there.all] == seen

    resume(server)
    held = [generation for generation in there.all if not generation.has_ended]
    for generation, output in zip(held, expect_all_go_on(held), strict=True):
        retractions = int(mode == "retract" and generation in there.admitted)
        assert output.meta["num_retractions"] == retractions


@pytest.mark.parametrize(
    "mode", [pytest.param("in_place", marks=pytest.mark.guards_fix), "retract"]
)
def test_no_token_after_the_answer(server: Server, checkpoints: Path, mode: str) -> None:
    """Tokens by the old weights all arrive before the pause's answer."""
    generations = start_running(server, 4, tokens=ENDLESS)
    pause(server, mode)
    seen = settle(server, generations)
    update = {"model_path": str(checkpoints / "v1"), "weight_version": "v1", "flush_cache": False}
    assert server.post("/update_weights_from_disk", update)["success"]
    resume(server)
    outputs = expect_all_go_on(generations)
    assert [count_of(output, 0) for output in outputs] == seen
    assert [count_of(output, 1) for output in outputs] == [
        len(output.tokens) - count for output, count in zip(outputs, seen, strict=True)
    ]


def test_wait_pause_freezes_remaining_requests_at_the_timeout(server: Server) -> None:
    short, long = start(server, 2, tokens=4), start_running(server, 2, tokens=ENDLESS)
    (rank,) = pause(server, "wait", timeout_s=0.3)["ranks"]
    assert rank["running"] == 2
    for generation in short:
        expect_whole(generation)
    seen = settle(server, long)
    assert [generation.count for generation in long] == seen
    resume(server)
    expect_all_go_on(long)


def under_a_new_grammar(server: Server, tokens: int) -> Generation:
    """Start a request that waits for its grammar, in a queue of its own."""
    regex = f"(t[0-9]+|x{next(_grammars)})*"
    return Generation(server, tokens=tokens, sampling={"regex": regex})


def test_draining_pause_holds_a_request_waiting_for_its_grammar(any_server: Server) -> None:
    (running,) = start_running(any_server, 1, tokens=ENDLESS)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(pause, any_server, "wait")
        until("it drains", lambda: status(any_server)["state"] == "draining")
        held = under_a_new_grammar(any_server, tokens=10)
        until_waiting(any_server, 1)
        running.wait_for_tokens(running.count + 50)
        assert held.count == 0
        running.abort()
        (rank,) = asked.result()["ranks"]
    assert (rank["running"], rank["waiting"]) == (0, 1)
    assert settle(any_server, [held]) == [0]
    resume(any_server)
    assert held.output().finish_reason == "length"


def test_request_waiting_for_its_grammar_can_be_aborted_in_a_pause(any_server: Server) -> None:
    pause(any_server, "in_place")
    ended, goes_on = (under_a_new_grammar(any_server, tokens=10) for _ in range(2))
    until_waiting(any_server, 2)
    ended.abort()
    assert ended.output().finish_reason == "abort"
    assert status(any_server)["waiting"] == 1
    resume(any_server)
    assert goes_on.output().finish_reason == "length"


@dataclass
class Queues:
    """A second account of what pauses do to requests, independent of the scheduler's."""

    running: set[Generation]
    waiting: set[Generation] = field(default_factory=set)
    aborted: set[Generation] = field(default_factory=set)

    def pause(self, mode: str) -> tuple[int, int, int, int]:
        """Return the counts expected in a rank's answer."""
        retracted = aborted = 0
        if mode == "retract":
            retracted = len(self.running)
            self.waiting |= self.running
        if mode == "abort":
            aborted = len(self.running) + len(self.waiting)
            self.aborted |= self.running | self.waiting
            self.waiting.clear()
        if mode != "in_place":
            self.running.clear()
        return len(self.running), len(self.waiting), retracted, aborted


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(*pair, marks=pytest.mark.guards_fix if pair == ("in_place", "abort") else ())
        for pair in itertools.product(MODES, MODES)
    ],
)
def test_second_pause_of_any_mode_counts_correctly(server: Server, first: str, second: str) -> None:
    # a pause of mode ``wait`` needs requests with an end
    tokens = TOKENS if "wait" in (first, second) else ENDLESS
    generations = start_running(server, 2, tokens=tokens)
    queues = Queues(running=set(generations))
    for mode in (first, second):
        expected = queues.pause(mode)
        answer = pause(server, mode)
        if not UPSTREAM:
            (rank,) = answer["ranks"]
            assert tuple(rank[name] for name in COUNTS) == expected
        settle(server, generations)
        if mode == first:
            (late,) = start(server, 1, tokens=ENDLESS)
            queues.waiting.add(late)
            generations.append(late)
            until_waiting(server, len(queues.waiting))
    for generation in queues.aborted:
        expect_aborted(generation)
    held = queues.running | queues.waiting
    assert not any(generation.has_ended for generation in held)
    resume(server)
    expect_all_go_on(held)
    for generation in set(generations) - queues.aborted - held:
        expect_whole(generation)


def test_retract_after_in_place_retracts_all(any_server: Server) -> None:
    """The second pause does not wait for the result again."""
    generations = start_running(any_server, 4, tokens=TOKENS)
    pause(any_server, "in_place")
    frozen = settle(any_server, generations)
    (rank,) = pause(any_server, "retract")["ranks"]
    assert (rank["running"], rank["waiting"], rank["retracted"]) == (0, 4, 4)
    assert settle(any_server, generations) == frozen
    resume(any_server)
    for generation in generations:
        assert expect_whole(generation).meta["num_retractions"] == 1


def test_continue_without_a_pause_does_nothing(server: Server) -> None:
    (generation,) = start_running(server, 1, tokens=ENDLESS)
    assert resume(server)["paused"] is False
    assert resume(server)["paused"] is False
    expect_all_go_on([generation])


# ---- who holds a pause -----------------------------------------------------------------


def test_generation_resumes_with_the_last_holder(server: Server) -> None:
    (generation,) = start_running(server, 1, tokens=ENDLESS)
    one, other = (pause(server, "in_place")["pause_id"] for _ in range(2))
    assert {holder["pause_id"] for holder in status(server)["holders"]} == {one, other}
    assert resume(server, pause_id=one)["paused"] is True
    seen = settle(server, [generation])
    assert [generation.count] == seen
    assert resume(server, pause_id=other)["paused"] is False
    expect_all_go_on([generation])


def test_continue_without_an_id_releases_all_holders(server: Server) -> None:
    (generation,) = start_running(server, 1, tokens=ENDLESS)
    for _ in range(3):
        pause(server, "in_place")
    assert resume(server)["paused"] is False
    assert status(server)["holders"] == []
    expect_all_go_on([generation])


@pytest.mark.parametrize("held", [False, True], ids=["not paused", "paused by another"])
def test_stale_pause_id_is_refused(server: Server, held: bool) -> None:
    stale = pause(server, "in_place")["pause_id"]
    resume(server)
    if held:
        pause(server, "in_place")
    for path in ("/continue_generation", "/pause_generation"):
        answer = server.post(path, {"pause_id": stale})
        assert answer["status_code"] == 409, answer
        assert stale in answer["message"]
    assert status(server)["paused"] is held
    assert server.get("/is_paused")["is_paused"] is held


def test_expired_lease_resumes_generation(server: Server) -> None:
    (generation,) = start_running(server, 1, tokens=ENDLESS)
    pause_id = pause(server, "in_place", lease_s=0.3)["pause_id"]
    expect_all_go_on([generation])
    now = status(server)
    assert (now["paused"], now["holders"]) == (False, [])
    assert f"The lease of pause {pause_id} ran out" in server.log_text()
    assert server.post("/continue_generation", {"pause_id": pause_id})["status_code"] == 409


def test_server_is_ready_once_the_last_lease_expires(server: Server) -> None:
    """No status call is needed first."""
    for lease_s in (0.2, 0.5):
        pause(server, "in_place", lease_s=lease_s)
    assert server.get("/ready")["status_code"] == 503
    until("it is ready", lambda: server.get("/ready")["status_code"] == 200)


def test_renewed_lease_is_extended(server: Server) -> None:
    pause_id = pause(server, "in_place", lease_s=30)["pause_id"]
    pause(server, "in_place", pause_id=pause_id, lease_s=500)
    (holder,) = status(server)["holders"]
    assert holder["pause_id"] == pause_id
    assert 30 < holder["lease_left_s"] <= 500
    pause(server, "in_place", pause_id=pause_id)
    assert status(server)["holders"][0]["lease_left_s"] is None


def test_renewal_keeps_requests_frozen(server: Server) -> None:
    """Requests frozen at a ``wait`` pause's timeout must not continue."""
    (generation,) = start_running(server, 1, tokens=ENDLESS)
    pause_id = pause(server, "wait", timeout_s=0.2)["pause_id"]
    seen = settle(server, [generation])
    renewed = pause(server, "wait", pause_id=pause_id, timeout_s=0.2, lease_s=500)
    assert renewed["ranks"][0]["running"] == 1
    assert settle(server, [generation]) == seen
    assert status(server)["holders"][0]["lease_left_s"] > 30


def test_renewal_without_a_mode_keeps_the_mode(server: Server) -> None:
    (running,) = start_running(server, 1, tokens=TOKENS)
    pause_id = pause(server, "in_place", lease_s=60)["pause_id"]
    renewed = server.post("/pause_generation", {"pause_id": pause_id, "lease_s": 60})
    assert (renewed["status_code"], renewed["mode"]) == (200, "in_place")
    resume(server)
    expect_whole(running)


def test_expired_lease_leaves_the_other_holders(server: Server) -> None:
    (generation,) = start_running(server, 1, tokens=ENDLESS)
    pause(server, "in_place", lease_s=0.3)
    lasting = pause(server, "in_place")["pause_id"]
    until("one lease ran out", lambda: len(status(server)["holders"]) == 1)
    settle(server, [generation])
    assert status(server)["holders"][0]["pause_id"] == lasting
    resume(server, pause_id=lasting)
    expect_all_go_on([generation])


class Waiter:
    """Asks for a pause in its own thread, and returns once the server drains."""

    def __init__(self, server: Server, mode: str) -> None:
        self._server = server
        self._mode = mode
        self._answer: Any = None
        held = len(status(server)["holders"])
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()
        until("the pause is taken", lambda: len(status(server)["holders"]) > held)
        self.pause_id = status(server)["holders"][-1]["pause_id"]

    def _ask(self) -> None:
        self._answer = self._server.post("/pause_generation", {"mode": self._mode})

    def answer(self) -> Any:
        self._thread.join(PATIENCE_S)
        assert self._answer is not None, f"no answer to a pause of mode {self._mode}"
        return self._answer


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_overtaken_pause_is_refused_and_holds_nothing(server: Server, mode: str) -> None:
    (generation,) = start_running(server, 1, tokens=ENDLESS)
    overtaken = Waiter(server, "wait")
    pause_id = pause(server, mode)["pause_id"]
    assert overtaken.answer()["status_code"] == 409
    assert [holder["pause_id"] for holder in status(server)["holders"]] == [pause_id]
    settle(server, [generation])
    assert resume(server, pause_id=pause_id)["paused"] is False
    expect_all_go_on([generation])


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_pauses_that_drain_together_are_granted_together(server: Server, mode: str) -> None:
    tokens = TOKENS if mode == "wait" else ENDLESS
    (generation,) = start_running(server, 1, tokens=tokens)
    first = Waiter(server, "wait")
    second = pause(server, mode)
    answer = first.answer()
    assert answer["status_code"] == 200, answer
    for granted in (answer, second):
        assert granted["ranks"][0]["running"] == 0
    names = {first.pause_id, second["pause_id"]}
    assert {holder["pause_id"] for holder in status(server)["holders"]} == names
    assert generation.output().finish_reason == ("abort" if mode == "abort" else "length")
    assert resume(server, pause_id=first.pause_id)["paused"] is True
    assert resume(server, pause_id=second["pause_id"])["paused"] is False


def test_timeout_of_one_pause_ends_the_drain_of_all(server: Server) -> None:
    """A pause with a longer timeout is refused with the reason."""
    (generation,) = start_running(server, 1, tokens=ENDLESS)
    patient = Waiter(server, "wait")
    hasty = pause(server, "wait", timeout_s=0.2)
    assert hasty["ranks"][0]["running"] == 1
    answer = patient.answer()
    assert answer["status_code"] == 409, answer
    assert "timeout_s" in answer["message"]
    settle(server, [generation])
    assert resume(server, pause_id=hasty["pause_id"])["paused"] is False
    expect_all_go_on([generation])


def test_pause_released_while_draining_freezes_requests_of_the_other_holder(server: Server) -> None:
    (generation,) = start_running(server, 1, tokens=ENDLESS)
    lasting = pause(server, "in_place")["pause_id"]
    draining = Waiter(server, "wait")
    assert resume(server, pause_id=draining.pause_id)["paused"] is True
    assert draining.answer()["status_code"] == 409
    settle(server, [generation])
    assert resume(server, pause_id=lasting)["paused"] is False
    expect_all_go_on([generation])


# ---- requests and health during a pause ------------------------------------------------


@pytest.mark.guards_fix
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_request_sent_in_a_pause_is_queued_and_abortable(server: Server, stream: bool) -> None:
    """The scheduler queues the request, so an abort can find it there."""
    pause(server, "in_place")
    kept, dropped = start(server, 2, tokens=8, stream=stream)
    abort = {"rid": dropped.rid}

    def is_dropped() -> bool:
        server.post("/abort_request", abort)
        return dropped.has_ended

    until("an abort ends a request that waits", is_dropped)
    assert dropped.output().finish_reason == "abort"
    assert not kept.has_ended
    until_waiting(server, 1)
    resume(server)
    expect_whole(kept)


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(True, id="stream"),
        pytest.param(False, id="whole", marks=pytest.mark.guards_fix),
    ],
)
def test_client_disconnect_ends_its_waiting_request(server: Server, stream: bool) -> None:
    """The request never runs, so it leaves no prefix in the cache."""
    pause(server, "in_place")
    input_ids = prompt()
    (leaving,) = start(server, 1, tokens=8, input_ids=input_ids, stream=stream)
    (staying,) = start(server, 1, tokens=8, stream=stream)
    until_waiting(server, 2)
    leaving.disconnect()
    until_waiting(server, 1)
    resume(server)
    expect_whole(staying)
    (again,) = start(server, 1, tokens=1, input_ids=input_ids)
    assert expect_whole(again).meta["cached_tokens"] == 0


@pytest.mark.guards_fix
@pytest.mark.parametrize("path", ["/health", "/health_generate"])
def test_health_passes_while_paused(server: Server, path: str) -> None:
    (generation,) = start_running(server, 1, tokens=ENDLESS)
    pause(server, "in_place")
    settle(server, [generation])
    assert server.get(path)["status_code"] == 200
    assert httpx.get(f"{server.url}/ready").status_code == 503
    resume(server)
    assert httpx.get(f"{server.url}/ready").status_code == 200
    expect_all_go_on([generation])


@pytest.mark.guards_fix
def test_paused_scheduler_sleeps(server: Server) -> None:
    (generation,) = start_running(server, 1, tokens=ENDLESS)
    pause(server, "in_place")
    settle(server, [generation])
    (scheduler,) = schedulers(server.process.pid)
    # percent of the CPU, over two seconds without a call
    assert scheduler.cpu_percent(interval=2.0) < 10
    resume(server)
    expect_all_go_on([generation])


@pytest.mark.guards_fix
def test_watchdog_and_request_timeouts_spare_a_long_pause(normal_loop_server: Server) -> None:
    server = normal_loop_server
    generations = start_running(server, MAX_RUNNING, tokens=ENDLESS)
    generations += start(server, 2, tokens=ENDLESS)
    pause(server, "in_place")
    outlast_watchdog(server, WAITING_TIMEOUT_S)
    resume(server)
    expect_all_go_on(generations)


def test_full_queue_refuses_new_requests_while_paused(normal_loop_server: Server) -> None:
    server = normal_loop_server
    pause(server, "in_place")
    queued = start(server, MAX_QUEUED, tokens=4)
    until_waiting(server, MAX_QUEUED)
    (refused,) = start(server, 1, tokens=4, stream=False)
    until("the request is refused", lambda: refused.has_ended)
    assert refused.status == 503
    resume(server)
    for generation in queued:
        expect_whole(generation)
