"""A fleet chooses who sends to whom when servers catch up over the network.

The servers give canned answers. ``tests/extensions/saves/test_peers.py`` has real ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

import httpx
import pytest

from sglang_inflight.client import AsyncFleet, Fleet
from sglang_inflight.vocabulary.answers import (
    Answer,
    Expected,
    Offered,
    RankOffered,
    RankReceipt,
    Receipt,
)
from sglang_inflight.vocabulary.errors import Conflict, Refused
from tests.unit.test_returning import RETURNED, serving

OFFER, WITHDRAW = "/inflight/offer", "/inflight/withdraw"
EXPECT, RECEIVE = "/inflight/expect", "/inflight/update_weights_from_peer"
ONE, TWO, THREE = "http://one", "http://two", "http://three"
LATE, LATER = "http://late", "http://later"
URLS = (ONE, TWO, THREE, LATE, LATER)
RANK = RankReceipt(dp_rank=0, tp_rank=0, pp_rank=0, digest="aa")


class Servers:
    """Three servers with version 41, and two that are behind."""

    def __init__(self) -> None:
        # (url, path) of each call, in order
        self.calls: list[tuple[str, str]] = []
        # who took the offer of whom
        self.taken: list[tuple[str, str]] = []
        # the answer of a server at a path, by both: a status and a message, or None if it dies
        self.fails: dict[tuple[str, str], tuple[int, str] | None] = {}
        # the same for a late server at the offer of another
        self.fails_from: dict[tuple[str, str], tuple[int, str] | None] = {}

    def answers(self, url: str) -> Callable[[httpx.Request], httpx.Response]:
        def answer(request: httpx.Request) -> httpx.Response:
            path, body = request.url.path, json.loads(request.content or b"{}")
            self.calls.append((url, path))
            fails: Mapping[tuple[str, str], tuple[int, str] | None] = self.fails
            place = (url, path)
            if path == RECEIVE:
                sender = f"http://{body['offer_id']}"
                self.taken.append((url, sender))
                if (url, sender) in self.fails_from:
                    fails, place = self.fails_from, (url, sender)
            if place in fails:
                why = fails[place]
                if why is None:
                    raise httpx.ReadError("it is gone")
                error = {"type": "Conflict" if why[0] == 409 else "Refused", "message": why[1]}
                return httpx.Response(why[0], json={"success": False, "error": error})
            return httpx.Response(200, content=json.dumps(self.say(url, path).as_json()))

        return answer

    def say(self, url: str, path: str) -> Answer:
        if path == "/inflight/status":
            return RETURNED if url in (LATE, LATER) else serving("41", "aa")
        if path == EXPECT:
            return Expected(message="", weight_version="0", behind="it is")
        if path == OFFER:
            rank = RankOffered(tp_rank=0, pp_rank=0, host="h", port=1)
            return Offered(
                message="",
                offer_id=url.removeprefix("http://"),
                token="t",
                weight_version="41",
                seconds=1,
                ranks=(rank,),
            )
        if path == RECEIVE:
            return Receipt(
                message="", weight_version="41", base_version="0", epoch=1, staged_s=0, stall_ms=0,
                bytes=0, tensors=0, retracted=0, ranks=(RANK,),
            )  # fmt: skip
        assert path == WITHDRAW
        return Answer()

    def called(self, path: str) -> list[str]:
        return [url for url, called in self.calls if called == path]


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
def fleet(servers: Servers) -> Iterator[Fleet]:
    with Fleet(URLS) as fleet:
        inside: AsyncFleet = fleet.client
        for server in inside.servers:
            transport = httpx.MockTransport(servers.answers(server.url))
            server._http = httpx.AsyncClient(transport=transport, base_url=server.url)
        yield fleet


def test_late_servers_ask_different_peers(servers: Servers, fleet: Fleet) -> None:
    report = fleet.catch_up()
    assert not report.failures
    peers = [report.answers[late].peer for late in (LATE, LATER)]
    assert len({*peers}) == 2
    assert {*servers.taken} == {(LATE, peers[0]), (LATER, peers[1])}
    assert sorted(servers.called(OFFER)) == sorted(servers.called(WITHDRAW))
    assert report.answers[ONE].receipt is None


@pytest.mark.parametrize("status_code", [400, 409])
def test_next_peer_sends_if_one_fails(servers: Servers, fleet: Fleet, status_code: int) -> None:
    servers.fails[ONE, OFFER] = None
    servers.fails_from[LATE, TWO] = status_code, "it has another digest"
    report = fleet.catch_up()
    assert not report.failures
    assert report.answers[LATE].peer == THREE
    assert report.answers[LATER].peer in (TWO, THREE)
    # each offer has ended, whatever came of it
    offers = [peer for peer in servers.called(OFFER) if peer != ONE]
    assert sorted(servers.called(WITHDRAW)) == sorted(offers)


def test_last_reason_is_told_if_every_peer_fails(servers: Servers, fleet: Fleet) -> None:
    for peer in (ONE, TWO, THREE):
        servers.fails_from[LATE, peer] = 409, f"{peer} is silent"
    report = fleet.catch_up()
    assert "is silent" in str(report.failures[LATE])
    assert isinstance(report.failures[LATE], Conflict)
    assert len([late for late, _ in servers.taken if late == LATE]) == 3
    assert report.answers[LATER].receipt is not None
    assert sorted(servers.called(OFFER)) == sorted(servers.called(WITHDRAW))


def test_late_server_that_dies_asks_no_other_peer(servers: Servers, fleet: Fleet) -> None:
    servers.fails[LATE, RECEIVE] = None
    report = fleet.catch_up()
    assert not isinstance(report.failures[LATE], Refused)
    assert len([late for late, _ in servers.taken if late == LATE]) == 1
    assert sorted(servers.called(OFFER)) == sorted(servers.called(WITHDRAW))
