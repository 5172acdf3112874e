"""A server takes the fleet's version from a peer over the network, rank from rank."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import marker
from harness.server import Server, schedulers, serve
from harness.starting import end
from sglang_inflight.client import Client, Fleet
from tests.support import gemma
from tests.support.faults import ENV as FAULTY
from tests.support.faults import Faults
from tests.support.load import (
    ENDLESS,
    expect_all_go_on,
    more_tokens,
    start_running,
    status,
    until,
    update,
    versions_of,
)
from tests.support.pool import CHANGES
from tests.support.updates import (
    LIVE,
    Call,
    expect_served,
    refuse,
    serving,
    succeed,
    tensor_body,
)

pytest_plugins = ["tests.support.fixtures"]
pytestmark = pytest.mark.usefixtures("as_before")

OFFER, WITHDRAW = "/inflight/offer", "/inflight/withdraw"
EXPECT, FROM_PEER = "/inflight/expect", "/inflight/update_weights_from_peer"
FROM_TENSOR = "/update_weights_from_tensor"
V0 = ("--weight-version", "v0")


@pytest.fixture
def offered(peer: Server) -> Iterator[dict[str, Any]]:
    """An offer of the peer, withdrawn afterwards."""
    found = offer(peer)
    yield found
    succeed(peer.post(WITHDRAW, {"offer_id": found["offer_id"]}))


def offer(server: Server, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = succeed(server.post(OFFER, fields))
    return found


def body_of(offered: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {name: offered[name] for name in ("offer_id", "token", "ranks")} | LIVE | fields


def receive(server: Server, offered: Mapping[str, Any], **fields: Any) -> Any:
    return server.post(FROM_PEER, body_of(offered, **fields))


def digests(answer: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    return sorted((rank["pp_rank"], rank["tp_rank"], rank["digest"]) for rank in answer["ranks"])


def scheduler_of(server: Server) -> int:
    """Return the process id of the server's only rank."""
    (scheduler,) = schedulers(server.process.pid)
    return scheduler.pid


# ---- the whole way --------------------------------------------------------------------


def test_late_servers_take_turns_at_one_peer(
    peer: Server, joiner: Server, checkpoints: Path, tmp_path: Path
) -> None:
    with serve(checkpoints / "v0", *V0, log=tmp_path / "log") as other:
        with Fleet([peer.url, joiner.url, other.url]) as fleet:
            report = fleet.catch_up(weight_version="v1")
        assert not report.failures
        for late in (joiner, other):
            assert report.answers[late.url].peer == peer.url
            assert digests(status(late)) == digests(status(peer))
            expect_served(late, 1)


def test_next_peer_sends_if_one_dies(
    peer: Server, joiner: Server, faults: Faults, checkpoints: Path, tmp_path: Path
) -> None:
    """The peer without requests is asked first, and is killed in the midst."""
    log = tmp_path / "log"
    running = start_running(peer, 1, tokens=ENDLESS) + start_running(joiner, 1, tokens=ENDLESS)
    with serve(checkpoints / "v0", *V0, log=log, env=FAULTY) as dying:
        update(dying, checkpoints, 1, **LIVE)
        faults.inject("send", "hang_deaf", pid=scheduler_of(dying))
        with Fleet([peer.url, dying.url, joiner.url]) as fleet:
            reports: list[Any] = []

            def catch_up() -> dict[str, Any]:
                reports.append(fleet.catch_up())
                return {}

            catching_up = Call.of(catch_up)
            until("the transfer has begun", faults.is_reached)
            end(dying.process)
            catching_up.answer()
    (report,) = reports
    assert report.answers[joiner.url].peer == peer.url
    assert joiner.url not in report.failures
    assert digests(status(joiner)) == digests(status(peer))
    for output in expect_all_go_on(running):
        assert versions_of(output)[-1] == "v1"


# ---- a transfer that fails ----------------------------------------------------------------


def test_peer_killed_amid_the_transfer_changes_nothing(
    joiner: Server, faults: Faults, checkpoints: Path, tmp_path: Path
) -> None:
    running = start_running(joiner, 2, tokens=ENDLESS)
    before = serving(joiner)
    with serve(checkpoints / "v0", *V0, log=tmp_path / "log", env=FAULTY) as dying:
        update(dying, checkpoints, 1, **LIVE)
        faults.inject("send", "hang_deaf")
        receiving = Call(joiner, FROM_PEER, body_of(offer(dying)))
        until("the transfer has begun", faults.is_reached)
        more_tokens(running)
        assert not receiving.is_answered
        end(dying.process)
        refuse(receiving.answer(), "the peer's rank pp0-tp0", "closed", status_code=409)
    assert serving(joiner) == before
    expect_served(joiner, 0)
    update(joiner, checkpoints, 2, **LIVE)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v2"]


def test_stopped_peer_costs_the_update_its_time_alone(
    peer: Server, joiner: Server, offered: dict[str, Any]
) -> None:
    running = start_running(joiner, 1, tokens=ENDLESS)
    (scheduler,) = schedulers(peer.process.pid)
    scheduler.send_signal(signal.SIGSTOP)
    try:
        refuse(receive(joiner, offered, timeout_s=2), "time ran out")
        more_tokens(running)
        expect_served(joiner, 0)
    finally:
        scheduler.send_signal(signal.SIGCONT)
    assert digests(succeed(receive(joiner, offered))) == digests(status(peer))
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1"]


def test_version_that_moves_on_amid_the_transfer_is_not_taken(
    peer: Server,
    joiner: Server,
    offered: dict[str, Any],
    faults: Faults,
    checkpoints: Path,
) -> None:
    running = start_running(peer, 1, tokens=ENDLESS) + start_running(joiner, 1, tokens=ENDLESS)
    before = serving(joiner)
    faults.inject("send", "hang_deaf")
    receiving = Call(joiner, FROM_PEER, body_of(offered))
    until("the transfer has begun", faults.is_reached)
    # the trainer's update neither waits for the transfer nor is refused
    update(peer, checkpoints, 2, **LIVE, timeout_s=60)
    assert not receiving.is_answered
    faults.clear()
    refuse(receiving.answer(), "the peer's rank pp0-tp0", "moved on", status_code=409)
    assert serving(joiner) == before
    refuse(receive(joiner, offered), "moved on", status_code=409)
    # the fleet's offer would wait for a minute, in case that a receiver came for this one
    succeed(peer.post(WITHDRAW, {"offer_id": offered["offer_id"]}))
    with Fleet([peer.url, joiner.url]) as fleet:
        report = fleet.catch_up(weight_version="v2")
    assert report.answers[joiner.url].digest == status(peer)["digest"]
    for output, seen in zip(expect_all_go_on(running), (["v1", "v2"], ["v0", "v2"]), strict=True):
        assert versions_of(output) == seen


def test_released_memory_is_not_read_by_a_transfer(
    peer: Server, joiner: Server, offered: dict[str, Any], faults: Faults
) -> None:
    faults.inject("send", "hang_deaf")
    receiving = Call(joiner, FROM_PEER, body_of(offered))
    until("the transfer has begun", faults.is_reached)
    release = {"tags": ["weights"], "keep_weights": "host"}
    succeed(peer.post("/release_memory_occupation", release))
    faults.clear()
    refuse(receiving.answer(), "the peer's rank pp0-tp0", status_code=409)
    refuse(peer.post(OFFER, {}), "released", status_code=409)
    expect_served(joiner, 0)
    succeed(peer.post("/resume_memory_occupation", {"tags": ["weights"]}))
    with Fleet([peer.url, joiner.url]) as fleet:
        assert not fleet.catch_up(weight_version="v1").failures
    expect_served(joiner, 1)


def test_offer_withdrawn_amid_the_transfer_ends_it(
    peer: Server, joiner: Server, offered: dict[str, Any], faults: Faults
) -> None:
    faults.inject("send", "hang_deaf")
    receiving = Call(joiner, FROM_PEER, body_of(offered))
    until("the transfer has begun", faults.is_reached)
    succeed(peer.post(WITHDRAW, {"offer_id": offered["offer_id"]}))
    refuse(receiving.answer(), "the peer's rank pp0-tp0", status_code=409)
    faults.clear()
    refuse(receive(joiner, offered), "the peer's rank pp0-tp0", status_code=409)
    expect_served(joiner, 0)


def test_only_the_token_opens_an_offer(
    peer: Server, joiner: Server, offered: dict[str, Any]
) -> None:
    (rank,) = offered["ranks"]
    strangers = [
        socket.create_connection((rank["host"], rank["port"]), timeout=60) for _ in range(2)
    ]
    silent, guessing = strangers
    guessing.sendall(b"0" * 64)
    assert guessing.recv(1) == b""
    refuse(receive(joiner, offered, token="0" * 64), "closed", status_code=409)
    refuse(receive(joiner, offered, token="short"), "token")
    expect_served(joiner, 0)
    # a connection that says nothing delays no other one
    succeed(receive(joiner, offered))
    for stranger in strangers:
        stranger.close()
    expect_served(joiner, 1)
    assert silent.fileno() == -1
    for server in (peer, joiner):
        assert offered["token"] not in server.log_text()


def test_second_offer_waits_for_the_first(peer: Server, offered: dict[str, Any]) -> None:
    second = Call(peer, OFFER, {})
    refuse(peer.post(OFFER, {"timeout_s": 1}), "time ran out")
    assert not second.is_answered
    succeed(peer.post(WITHDRAW, {"offer_id": offered["offer_id"]}))
    found = succeed(second.answer())
    assert found["token"] != offered["token"]
    succeed(peer.post(WITHDRAW, {"offer_id": found["offer_id"]}))
    # one that has ended already
    succeed(peer.post(WITHDRAW, {"offer_id": found["offer_id"]}))


def test_offer_that_cannot_be_made_is_refused(
    peer: Server, joiner: Server, offered: dict[str, Any]
) -> None:
    succeed(peer.post(WITHDRAW, {"offer_id": offered["offer_id"]}))
    refuse(peer.post(OFFER, {"host": "here"}), "no IP address")
    # an address for documents, which no machine has
    refuse(peer.post(OFFER, {"host": "203.0.113.7"}), "203.0.113.7")
    refuse(peer.post(OFFER, {"expected_version": "v7"}), "'v7'", "'v1'", status_code=409)
    refuse(peer.post(WITHDRAW, {}), "offer_id")
    local = offer(peer, host="127.0.0.1")
    assert [rank["host"] for rank in local["ranks"]] == ["127.0.0.1"]
    for fields, word in (
        ({"selector": "target"}, "selector"),
        ({"partial": True}, "partial"),
        ({"expected_digest": "0" * 16}, "expected_digest"),
        ({"ranks": []}, "ranks"),
        ({"ranks": [local["ranks"][0] | {"tp_rank": 1}]}, "other ranks: pp0-tp1"),
    ):
        refuse(receive(joiner, local, **fields), word)
    wrong = [local["ranks"][0] | {"digest": "0" * 16}]
    refuse(receive(joiner, local, ranks=wrong), "0" * 16, status_code=409)
    expect_served(joiner, 0)
    with Client(joiner.url) as client, Client(peer.url) as source:
        source.withdraw_served_weights(local["offer_id"])
        found = source.offer_served_weights(expected_version="v1", host="127.0.0.1")
        receipt = client.update_from_peer(found, weight_version="other")
        source.withdraw_served_weights(found.offer_id)
    assert receipt.weight_version == "other"
    assert status(joiner)["digest"] == status(peer)["digest"]


# ---- each kind of server ------------------------------------------------------------------

MODES: dict[str, tuple[Mapping[str, str], tuple[str, ...]]] = {
    "host": ({"SGLANG_INFLIGHT_STAGING": "host"}, ()),
    "off": ({"SGLANG_INFLIGHT_STAGING": "off"}, ()),
    "hollow": ({"SGLANG_INFLIGHT_REQUIRE_UPDATE": "1"}, ("--load-format", "dummy")),
}


@pytest.mark.parametrize("mode", MODES)
def test_weights_come_in_each_form_of_staging(
    peer: Server,
    offered: dict[str, Any],
    faults: Faults,
    checkpoints: Path,
    tmp_path: Path,
    mode: str,
) -> None:
    env, flags = MODES[mode]
    with serve(checkpoints / "v0", *V0, *flags, log=tmp_path / "log", env=dict(env)) as one:
        running = start_running(one, 1, tokens=ENDLESS) if mode != "hollow" else []
        faults.inject("send", "wrong_tensor")
        refuse(receive(one, offered), "has the digest")
        faults.clear()
        if mode == "hollow":
            refuse(one.post(OFFER, {}), "hollow", status_code=409)
        else:
            # damage is found before the first write
            expect_served(one, 0)
        received = succeed(receive(one, offered))
        assert received["weight_version"] == "v1"
        assert digests(received) == digests(status(peer)) == digests(status(one))
        expect_served(one, 1)
        more_tokens(running)
        head = {"lm_head.weight": marker.tensors(2)["lm_head.weight"]}
        succeed(one.post(FROM_TENSOR, tensor_body(head, weight_version="v2", **LIVE)))
        assert update(peer, checkpoints, 2, **LIVE)["ranks"][0]["digest"] == status(one)["digest"]
        if mode == "host":
            succeed(one.post("/inflight/rollback", {}))
            expect_served(one, 1)
        for output in expect_all_go_on(running):
            assert versions_of(output)[:3] == ["v0", "v1", "v2"]


def test_weights_that_outgrow_their_memory_are_written_in_place(
    peer: Server, offered: dict[str, Any], checkpoints: Path, tmp_path: Path
) -> None:
    env = {**CHANGES, "SGLANG_INFLIGHT_CHANGES_BYTES": "16"}
    with serve(checkpoints / "v0", *V0, log=tmp_path / "log", env=env) as one:
        receipt = succeed(receive(one, offered))
        assert receipt["staged_as"]["form"] == "off"
        assert digests(receipt) == digests(status(peer))
        expect_served(one, 1)


def test_model_that_is_finished_after_loading_comes_as_it_is(tmp_path: Path) -> None:
    folders = [gemma.build(tmp_path / f"v{version}", version) for version in range(3)]
    with (
        serve(folders[0], *V0, log=tmp_path / "a.log") as one,
        serve(folders[0], *V0, log=tmp_path / "b.log") as other,
    ):
        update(one, tmp_path, 1, **LIVE)
        assert digests(succeed(receive(other, offer(one)))) == digests(status(one))
        expect_served(other, 1)
        for server in (one, other):
            update(server, tmp_path, 2, **LIVE)
        assert digests(status(one)) == digests(status(other))


def test_servers_of_another_layout_exchange_no_weights(
    peer: Server, offered: dict[str, Any], checkpoints: Path, tmp_path: Path
) -> None:
    with serve(checkpoints / "v0", *V0, "--tp-size", "2", log=tmp_path / "log") as two:
        before = serving(two)
        refuse(receive(two, offered), "layout")
        with Fleet([peer.url, two.url]) as fleet:
            report = fleet.catch_up(weight_version="v1")
        assert "same layout" in str(report.failures[two.url])
        assert serving(two) == before
