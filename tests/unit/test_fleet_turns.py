"""Order of changes in a fleet of prefill servers and decode servers.

The servers give canned answers, because only the order of calls is tested.
``tests/extensions/disaggregation/pairs/`` has real pairs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from sglang_inflight.client import AsyncFleet, Fleet, FleetRefused, FleetSplit
from sglang_inflight.vocabulary.answers import (
    Answer,
    Begun,
    Capabilities,
    Grant,
    RankStatus,
    Receipt,
    Release,
    Role,
    StagedSoFar,
    StagingStatus,
    Status,
)
from sglang_inflight.vocabulary.errors import Conflict

BEGIN, SEAL, END = "/begin_weight_update", "/seal_weight_update", "/end_weight_update"
PAUSE, RESUME, ROLL_BACK = "/pause_generation", "/continue_generation", "/inflight/rollback"
STAGE = "/update_weights_from_disk"
ROLES: dict[str, Role] = {
    "http://decode-1": "decode",
    "http://prefill-1": "prefill",
    "http://whole": "both",
    "http://prefill-2": "prefill",
}
PREFILL, OTHERS = {"http://prefill-1", "http://prefill-2"}, {"http://decode-1", "http://whole"}


def status_of(role: Role) -> Status:
    state: dict[str, Any] = {
        "state": "running", "paused": False, "mode": None, "holders": (), "running": 0,
        "waiting": 0, "weight_version": "v0", "epoch": 0, "digest": None,
        "previous_version": None,
        "staging": StagingStatus(
            mode="host", state="empty", update_id=None, tensors=0, bytes=0, can_roll_back=True,
            dirty=None, refusal=None, groups={},
        ),
    }  # fmt: skip
    rank = RankStatus(**state, dp_rank=0, tp_rank=0, pp_rank=0)
    return Status(**state, capabilities=Capabilities(), role=role, ranks=(rank,))


RECEIPT = Receipt(
    message="", weight_version="v1", base_version="v0", epoch=1, staged_s=0, stall_ms=0, bytes=0,
    tensors=0, retracted=0, ranks=(),
)  # fmt: skip
STAGED = StagedSoFar(message="", weight_version="v0", staged_s=0, bytes=0, tensors=0)
ANSWERS: dict[str, Answer] = {
    BEGIN: Begun(message="", session_id="s"),
    STAGE: STAGED,
    SEAL: STAGED,
    END: RECEIPT,
    ROLL_BACK: RECEIPT,
    PAUSE: Grant(mode="retract", pause_id="p", weight_version="v0", ranks=()),
    RESUME: Release(message="", paused=False),
    "/abort_weight_update": Answer(),
}


class Servers:
    def __init__(self) -> None:
        # (url, path) of each answered call, in the order of the answers
        self.calls: list[tuple[str, str]] = []
        # bodies by path
        self.sent: dict[str, list[dict[str, Any]]] = {}
        # the path of the call at which a server dies, by url
        self.dies: dict[str, str] = {}

    def answers(self, url: str) -> Callable[[httpx.Request], Any]:
        async def answer(request: httpx.Request) -> httpx.Response:
            path = request.url.path
            if self.dies.get(url) == path:
                raise httpx.ReadError("it is gone")
            # prefill servers answer later unless the fleet waits for them
            if ROLES[url] == "prefill":
                await asyncio.sleep(0)
            self.calls.append((url, path))
            self.sent.setdefault(path, []).append(json.loads(request.content or b"{}"))
            said = status_of(ROLES[url]) if path.endswith("status") else ANSWERS[path]
            return httpx.Response(200, content=json.dumps(said.as_json()))

        return answer

    def called(self, path: str) -> list[str]:
        return [url for url, called in self.calls if called == path]


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
def fleet(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    with Fleet(ROLES) as fleet:
        inside: AsyncFleet = fleet.client
        for server in inside.servers:
            transport = httpx.MockTransport(servers.answers(server.url))
            server._http = httpx.AsyncClient(transport=transport, base_url=server.url)
        yield fleet


def expect_turns(urls: list[str], first: set[str] = PREFILL, last: set[str] = OTHERS) -> None:
    assert (set(urls[: len(first)]), set(urls[len(first) :])) == (first, last)
    assert len(urls) == len(first | last)


def test_prefill_servers_commit_first(servers: Servers, fleet: Fleet) -> None:
    report = fleet.update_from_disk("/v1", weight_version="v1")
    assert set(report.answers) == set(ROLES)
    expect_turns(servers.called(END))


def test_no_commit_after_a_prefill_server_died(servers: Servers, fleet: Fleet) -> None:
    servers.dies["http://prefill-2"] = END
    with pytest.raises(FleetSplit, match="was not asked to, because http://prefill-2") as split:
        fleet.update_from_disk("/v1", weight_version="v1")
    report = split.value.report
    assert report.phase == "commit"
    assert list(report.answers) == ["http://prefill-1"]
    assert report.uncertain == ["http://prefill-2"]
    assert all(isinstance(report.failures[url], Conflict) for url in OTHERS)
    assert servers.called(END) == ["http://prefill-1"]
    # the staged versions are dropped
    assert set(servers.called("/abort_weight_update")) >= OTHERS


def test_prefill_commits_when_decode_server_dies(servers: Servers, fleet: Fleet) -> None:
    servers.dies["http://decode-1"] = END
    with pytest.raises(FleetSplit) as split:
        fleet.update_from_disk("/v1", weight_version="v1")
    assert set(split.value.report.answers) == PREFILL | {"http://whole"}


def test_prefill_servers_pause_and_resume_first(servers: Servers, fleet: Fleet) -> None:
    with fleet.paused("retract") as report:
        assert set(report.answers) == set(ROLES)
        expect_turns(servers.called(PAUSE))
        assert servers.called(RESUME) == []
    expect_turns(servers.called(RESUME))


def test_failed_pause_resumes_all(servers: Servers, fleet: Fleet) -> None:
    servers.dies["http://decode-1"] = PAUSE
    with pytest.raises(FleetRefused) as refused, fleet.paused():
        raise AssertionError("not all are paused")
    assert list(refused.value.report.failures) == ["http://decode-1"]
    assert set(servers.called(RESUME)) >= PREFILL | {"http://whole"}


def test_prefill_servers_roll_back_first(servers: Servers, fleet: Fleet) -> None:
    fleet.roll_back()
    expect_turns(servers.called(ROLL_BACK))
    servers.calls.clear()
    fleet.roll_back(only=["http://decode-1", "http://prefill-1"])
    assert servers.called(ROLL_BACK) == ["http://prefill-1", "http://decode-1"]


def test_server_of_unknown_role_refuses_update(servers: Servers, fleet: Fleet) -> None:
    """A rollback needs no roles and goes on."""
    servers.dies["http://prefill-1"] = "/inflight/status"
    with pytest.raises(FleetRefused) as refused:
        fleet.update_from_disk("/v1")
    assert list(refused.value.report.failures) == ["http://prefill-1"]
    assert servers.called(SEAL) == []
    fleet.roll_back()
    assert set(servers.called(ROLL_BACK)) == set(ROLES)


@pytest.mark.parametrize("in_session", [False, True])
def test_flush_is_not_reversed_at_the_end(servers: Servers, fleet: Fleet, in_session: bool) -> None:
    """Each piece asks for a flush, and no end asks for another KV policy."""
    if in_session:
        with fleet.session():
            fleet.update_from_disk("/v1", flush_cache=True)
    else:
        fleet.update_from_disk("/v1", flush_cache=True)
    assert {body["flush_cache"] for body in servers.sent[STAGE]} == {True}
    assert [body.get("kv_cache") for body in servers.sent[END]] == [None] * len(ROLES)


@pytest.mark.parametrize(("field", "value"), [("kv_cache", "keep"), ("kv_max_age", 2)])
def test_kv_policy_is_sent_with_every_end(
    servers: Servers, fleet: Fleet, field: str, value: Any
) -> None:
    policy: Any = {field: value}
    fleet.update_from_disk("/v1", **policy)
    for path in (STAGE, END):
        assert [body[field] for body in servers.sent[path]] == [value] * len(ROLES)
