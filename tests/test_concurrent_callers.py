"""Callers that wait for each other, disconnect, retry, or call at once, all on one server."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import marker
from harness.server import Server, for_the_answer
from tests.support.load import (
    ENDLESS,
    expect_spans,
    pause,
    resume,
    start,
    start_running,
    status,
    until,
)
from tests.support.updates import (
    LIVE,
    V1,
    Call,
    drop_session,
    expect_served,
    expect_to_run_on,
    refuse,
    serving,
    staging,
    succeed,
    tensor_body,
    until_idle,
    until_staging,
)

DISK, TENSOR = "/update_weights_from_disk", "/update_weights_from_tensor"
BEGIN, SEAL, END = "/begin_weight_update", "/seal_weight_update", "/end_weight_update"
SHORT_S = 0.5


@pytest.fixture(autouse=True)
def no_session(server: Server) -> Iterator[None]:
    yield
    drop_session(server)


@pytest.fixture
def v2(checkpoints: Path) -> dict[str, Any]:
    """Body of a blocking update from disk in SGLang's own form."""
    return {"model_path": str(checkpoints / "v2"), "weight_version": "v2"}


def begin(server: Server, **fields: Any) -> dict[str, Any]:
    answer = succeed(server.post(BEGIN, {"non_blocking": True, **fields}))
    return {"session_id": answer["session_id"]}


def send_v1(server: Server, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.post(TENSOR, tensor_body(marker.tensors(1), **V1, **fields))
    return answer


# ---- an update that blocks, and others -----------------------------------------------------


def test_blocking_update_waiting_for_its_turn_blocks_no_other_call(
    server: Server, v2: dict[str, Any]
) -> None:
    named = begin(server)
    succeed(send_v1(server, **named))
    blocking = Call(server, DISK, v2)
    expect_served(server, 0)
    assert server.get("/health")["status_code"] == 200
    assert not blocking.is_answered
    # SGLang's clients send this end; in its turn it waits for running requests
    succeed(server.post(END, named))
    assert succeed(blocking.answer())["base_version"] == "v1"
    expect_served(server, 2)


def test_blocking_update_stops_waiting_for_its_turn_at_the_timeout(
    server: Server, v2: dict[str, Any]
) -> None:
    named = begin(server)
    late = server.post(DISK, {**v2, "timeout_s": SHORT_S})
    refuse(late, "another weight update", status_code=409)
    succeed(send_v1(server, **named))
    succeed(server.post(END, {**named, "non_blocking": True}))
    expect_served(server, 1)


def test_blocking_update_stops_waiting_for_requests_at_the_timeout(
    server: Server, v2: dict[str, Any]
) -> None:
    before = serving(server)
    running = start_running(server, 1, tokens=ENDLESS)
    late = server.post(DISK, {**v2, "timeout_s": SHORT_S})
    refuse(late, "requests still ran", status_code=409)
    until("no request is held back", lambda: not status(server)["holders"])
    expect_served(server, 0)
    assert serving(server) == before
    expect_to_run_on(server, running, [0])


def test_requests_queued_during_a_blocking_update_get_the_new_weights(
    server: Server, v2: dict[str, Any]
) -> None:
    (first,) = start_running(server, 1, tokens=ENDLESS)
    blocking = Call(server, DISK, v2)
    until("it waits for requests", lambda: status(server)["holders"])
    (second,) = start(server, 1, tokens=3)
    until("the second is queued", lambda: status(server)["waiting"] == 1)
    assert server.get("/health")["status_code"] == 200
    assert not blocking.is_answered
    first.abort()
    succeed(blocking.answer())
    assert set(first.output().tokens) == {marker.token(0)}
    assert second.output().tokens == [marker.token(2)] * 3
    assert not status(server)["paused"]


def test_replaced_blocking_update_admits_requests_again(server: Server, v2: dict[str, Any]) -> None:
    running = start_running(server, 1, tokens=ENDLESS)
    blocking = Call(server, DISK, v2)
    until("it waits for requests", lambda: status(server)["holders"])
    replacing = {**tensor_body(marker.tensors(1), **V1), "on_busy": "replace"}
    succeed(server.post(TENSOR, replacing))
    refuse(blocking.answer(), "dropped")
    expect_to_run_on(server, running, [0, 1])


def test_blocking_update_ignores_a_pause_whose_lease_ended(
    server: Server, v2: dict[str, Any]
) -> None:
    """The update waits for running requests as usual."""
    running = start_running(server, 1, tokens=ENDLESS)
    pause_id = pause(server, "in_place", lease_s=0.2)["pause_id"]
    ended = f"The lease of pause {pause_id} ran out"
    until("the lease has run out", lambda: ended in server.log_text())
    late = server.post(DISK, {**v2, "timeout_s": SHORT_S})
    refuse(late, "requests still ran", status_code=409)
    expect_to_run_on(server, running, [0])


# ---- callers that disconnect ---------------------------------------------------------------


def call_and_disconnect(server: Server, path: str, body: dict[str, Any]) -> None:
    """Send a call and close the connection before its answer."""
    with pytest.raises(httpx.ReadTimeout):
        server.post(path, body, timeout=for_the_answer(SHORT_S))


def until_disconnect_noticed(server: Server, path: str) -> None:
    until("the server has noticed", lambda: f"{path}: its caller has left" in server.log_text())


def test_queued_update_is_dropped_when_its_caller_leaves(
    server: Server, v2: dict[str, Any]
) -> None:
    named = begin(server)
    call_and_disconnect(server, DISK, {**v2, **LIVE})
    until_disconnect_noticed(server, DISK)
    succeed(send_v1(server, **named))
    succeed(server.post(END, {**named, "non_blocking": True}))
    # no other caller is ahead in the queue
    succeed(server.post(DISK, {**v2, **LIVE, "on_busy": "refuse", "expected_version": "v1"}))


def test_queued_rollback_is_dropped_when_its_caller_leaves(server: Server) -> None:
    succeed(send_v1(server))
    named = begin(server)
    call_and_disconnect(server, "/inflight/rollback", {})
    until_disconnect_noticed(server, "/inflight/rollback")
    succeed(server.post("/abort_weight_update", named))
    expect_served(server, 1)


def test_draining_pause_is_released_when_its_caller_leaves(server: Server) -> None:
    running = start_running(server, 1, tokens=ENDLESS)
    call_and_disconnect(server, "/pause_generation", {"mode": "wait"})
    until("no pause is held", lambda: not status(server)["holders"])
    expect_served(server, 0)
    expect_to_run_on(server, running, [0])


def test_blocking_update_admits_requests_when_its_caller_leaves(
    server: Server, v2: dict[str, Any]
) -> None:
    running = start_running(server, 1, tokens=ENDLESS)
    call_and_disconnect(server, DISK, v2)
    until("no request is held back", lambda: not status(server)["holders"])
    until_idle(server)
    expect_served(server, 0)
    expect_to_run_on(server, running, [0])


# ---- calls that are made twice ----------------------------------------------------------------


def test_retried_rollback_is_done_once(server: Server) -> None:
    succeed(send_v1(server))
    body = {"expected_version": "v1"}
    assert succeed(server.post("/inflight/rollback", body))["weight_version"] == "v0"
    refuse(server.post("/inflight/rollback", body), "'v1'", "'v0'", status_code=409)
    expect_served(server, 0)


def test_concurrent_ends_of_a_session_commit_once(server: Server) -> None:
    running = start_running(server, 2, tokens=ENDLESS)
    epoch = status(server)["epoch"]
    named = begin(server)
    succeed(send_v1(server, **named))
    body = {**named, "non_blocking": True}
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda _: server.post(END, body), range(5)))
    ended = [answer for answer in answers if answer["status_code"] == 200]
    assert ended
    # an end after the commit finds no session; no other answer is possible
    for answer in answers:
        if answer not in ended:
            refuse(answer, "is not open", status_code=409)
    assert {answer["epoch"] for answer in ended} == {epoch + 1}
    assert status(server)["epoch"] == epoch + 1
    # the turn was released once: the next holder still keeps others out
    begin(server)
    refuse(send_v1(server, on_busy="refuse"), "another weight update", status_code=409)
    expect_to_run_on(server, running, [0, 1])


def test_retried_pause_has_one_holder(server: Server) -> None:
    body = {"mode": "in_place", "new_id": uuid.uuid4().hex, "lease_s": 300}
    for _ in range(2):
        answer = server.post("/pause_generation", body)
        assert (answer["status_code"], answer["pause_id"]) == (200, body["new_id"])
        assert [holder["pause_id"] for holder in status(server)["holders"]] == [body["new_id"]]
    resume(server, pause_id=body["new_id"])
    assert not status(server)["paused"]


def test_retried_begin_opens_one_session(server: Server) -> None:
    body = {"new_id": uuid.uuid4().hex}
    named = begin(server, **body)
    succeed(send_v1(server, **named))
    assert begin(server, **body) == named == {"session_id": body["new_id"]}
    succeed(server.post(END, {**named, "non_blocking": True}))
    expect_served(server, 1)


def test_pause_id_and_new_id_together_are_refused(server: Server) -> None:
    body = {"pause_id": "a", "new_id": "b", "mode": "in_place"}
    answer = server.post("/pause_generation", body)
    refuse(answer, "pause_id", "new_id")


# ---- sessions ------------------------------------------------------------------------------------


def test_session_outlives_the_timeouts_of_its_pieces(server: Server) -> None:
    """``timeout_s`` bounds one call, not the session."""
    named = begin(server)
    items = list(marker.tensors(1).items())
    # longer than a busy machine needs for a piece
    long_s = 8 * SHORT_S
    for part in (dict(items[:5]), dict(items[5:])):
        succeed(server.post(TENSOR, tensor_body(part, **V1, **named, timeout_s=long_s)))
    time.sleep(1.1 * long_s)
    succeed(server.post(END, {**named, "non_blocking": True}))
    expect_served(server, 1)


def test_session_refuses_pieces_without_its_id(server: Server, v2: dict[str, Any]) -> None:
    """A session begun with ``non_blocking`` takes in only calls that name it."""
    named = begin(server)
    whole = {**v2, **LIVE, "on_busy": "refuse"}
    refuse(server.post(DISK, whole), "another weight update is going on", status_code=409)
    piece = tensor_body(marker.tensors(2))
    refuse(server.post(TENSOR, piece), "session_id", status_code=409)
    refuse(server.post(END, {}), "session_id", status_code=409)
    refuse(server.post(SEAL, {}), "session_id", status_code=409)
    assert staging(server)[0]["tensors"] == 0
    succeed(send_v1(server, **named))
    succeed(server.post(END, {**named, "non_blocking": True}))
    expect_served(server, 1)


def test_whole_update_with_on_busy_replaces_an_open_session(
    server: Server, v2: dict[str, Any]
) -> None:
    """SGLang's own session would take in an unnamed call; ``on_busy`` marks a whole update."""
    succeed(server.post(BEGIN, {}))
    succeed(send_v1(server))
    until_staging(server, tensors=1)
    receipt = succeed(server.post(DISK, {**v2, **LIVE, "on_busy": "replace"}))
    assert receipt["weight_version"] == "v2"
    refuse(server.post(END, {}), "no weight-update session is open")
    expect_served(server, 2)


# ---- abort_all_requests -----------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [False, True], ids=["live", "blocking"])
def test_abort_all_requests_aborts_only_at_the_commit(
    server: Server, v2: dict[str, Any], checkpoints: Path, blocks: bool
) -> None:
    fields = {"abort_all_requests": True, **({} if blocks else LIVE)}
    running = start_running(server, 2, tokens=ENDLESS)
    missing = str(checkpoints / "none")
    refuse(server.post(DISK, {**v2, **fields, "model_path": missing}), "none")
    for generation in running:
        generation.wait_for_tokens(generation.count + 3)
    succeed(server.post(DISK, {**v2, **fields}))
    for generation in running:
        output = generation.output()
        assert output.finish_reason == "abort"
        expect_spans(output)
    expect_served(server, 2)
