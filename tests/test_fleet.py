"""Two servers under load that all commit an update, or all keep the old version."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import marker
from harness.server import Server, free_port, serve
from sglang_inflight.client import (
    AsyncFleet,
    Client,
    Fleet,
    FleetRefused,
    FleetSplit,
    Sender,
    buckets,
)
from sglang_inflight.vocabulary.errors import Conflict
from tests.support.examples import run
from tests.support.load import ENDLESS, expect_all_go_on, start_running, status, until
from tests.support.pool import restore
from tests.support.proxy import Proxy
from tests.support.updates import (
    drop_session,
    expect_served,
    expect_to_run_on,
    serving,
    staging,
    tensor_body,
)

SEAL, END = "/seal_weight_update", "/end_weight_update"
# timeout of a fleet with a hanging server; longer than busy cores take to answer
PATIENCE_S = 5.0


@pytest.fixture(scope="module")
def beside(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server beside the pool's."""
    log = tmp_path_factory.mktemp("fleet") / "second.log"
    with serve(checkpoints / "v0", "--weight-version", "v0", log=log) as server:
        yield server


@pytest.fixture
def servers(server: Server, beside: Server, checkpoints: Path) -> Iterator[list[Server]]:
    yield [server, beside]
    drop_session(server)
    if beside.is_alive():
        drop_session(beside)
        restore(beside, checkpoints / "v0")


@pytest.fixture
def way(servers: list[Server]) -> Iterator[Proxy]:
    """A proxy between the fleet and the second server."""
    with Proxy(servers[1]).serving() as proxy:
        yield proxy


@pytest.fixture
def fleet(servers: list[Server], way: Proxy) -> Iterator[Fleet]:
    with Fleet([servers[0].url, way.url]) as fleet:
        yield fleet


@pytest.fixture
def dead_url() -> str:
    return f"http://127.0.0.1:{free_port()}"


def expect_unchanged(servers: list[Server]) -> None:
    """Check that version 0 is served, nothing is staged, and no caller waits for a turn."""
    for server in servers:
        assert status(server)["ranks"][0]["staging"]["state"] == "empty"
        assert status(server)["weight_version"] == "v0"
        expect_served(server, 0)


# ---- updates -----------------------------------------------------------------------------


def test_update_goes_live_on_both_servers(
    servers: list[Server], fleet: Fleet, checkpoints: Path
) -> None:
    running = [(server, start_running(server, 2, tokens=ENDLESS)) for server in servers]
    report = fleet.update_from_disk(str(checkpoints / "v1"), weight_version="v1")
    assert not report.failures
    assert [a["weight_version"] for a in report.answers.values()] == ["v1", "v1"]
    assert {a["weight_version"] for a in fleet.status().answers.values()} == {"v1"}
    for server, generations in running:
        expect_to_run_on(server, generations, [0, 1])


def test_session_goes_live_on_both_servers(
    servers: list[Server], way: Proxy, checkpoints: Path
) -> None:
    weights = marker.tensors(1)
    head = {"lm_head.weight": weights.pop("lm_head.weight")}

    async def train() -> None:
        async with AsyncFleet([servers[0].url, way.url]) as fleet:
            async with fleet.session(weight_version="v1", partial=False) as report:
                await fleet.update("tensor", **tensor_body(weights))
                await fleet.update("tensor", **tensor_body(head))
                versions = (await fleet.status()).answers.values()
                assert {answer["weight_version"] for answer in versions} == {"v0"}
            assert {a["weight_version"] for a in report.answers.values()} == {"v1"}

    asyncio.run(train())
    for server in servers:
        expect_served(server, 1)


def test_failed_session_block_changes_no_server(servers: list[Server], fleet: Fleet) -> None:
    def send_and_fail() -> None:
        with fleet.session(weight_version="v1"):
            fleet.update("tensor", **tensor_body(marker.tensors(1)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        send_and_fail()
    expect_unchanged(servers)


def test_sender_updates_all_servers_or_none(
    servers: list[Server], fleet: Fleet, way: Proxy
) -> None:
    """One broadcast reaches the ranks of all servers."""
    running = [(server, start_running(server, 2, tokens=ENDLESS)) for server in servers]
    with Sender(fleet, bucket_bytes=64 << 10) as sender:
        wrong = marker.tensors(1) | {"model.norm.weight": marker.tensors(1)["lm_head.weight"]}
        with pytest.raises(FleetRefused, match=r"model\.norm"):
            sender.send(wrong.items())
        expect_unchanged(servers)
        report = sender.send(marker.tensors(1).items(), weight_version="v1")
    assert [a["weight_version"] for a in report.answers.values()] == ["v1", "v1"]
    for server, generations in running:
        expect_to_run_on(server, generations, [0, 1])


def test_server_without_a_layout_does_not_hold_up_the_other(
    servers: list[Server], fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first server's ranks receive, while the second one asks for the whole layout."""
    monkeypatch.setattr(buckets, "FEWEST_KEPT", 1)
    with Client(servers[0].url) as first, Sender(first) as sender:
        sender.send(marker.tensors(1).items(), weight_version="v1")
        known = dict(first.client._layouts._sent)
    assert known
    for client in fleet.client.servers:
        client._layouts._sent |= known
    with Sender(fleet) as sender:
        for version in (2, 3):
            report = sender.send(marker.tensors(version).items(), weight_version=f"v{version}")
            assert not report.failures
            for server in servers:
                expect_served(server, version)


def test_sender_of_changes_sends_a_whole_version_if_one_server_needs_it(
    servers: list[Server], fleet: Fleet
) -> None:
    """One broadcast reaches all servers, so all of them get the whole version."""
    whole = len(marker.tensors(0))
    with Sender(fleet, sparse=True) as sender:
        for version, tensors in (1, whole), (2, 1):
            report = sender.send(marker.tensors(version).items(), weight_version=f"v{version}")
            assert [receipt.tensors for receipt in report.answers.values()] == [tensors] * 2
        body = tensor_body(marker.tensors(5), non_blocking=True, weight_version="v2")
        assert servers[1].post("/update_weights_from_tensor", body)["success"]
        for version, tensors in (3, whole), (4, 1):
            report = sender.send(marker.tensors(version).items(), weight_version=f"v{version}")
            assert [receipt.tensors for receipt in report.answers.values()] == [tensors] * 2
    for server in servers:
        expect_served(server, 4)


def test_fleet_example_updates_and_rolls_back(
    servers: list[Server], checkpoints: Path, dead_url: str, tmp_path: Path
) -> None:
    urls = [server.url for server in servers]
    new = ("--model-path", str(checkpoints / "v1"), "--weight-version", "v1")
    lines = run(tmp_path, "fleet", "--url", urls[0], "--url", urls[1], *new, "--roll-back")
    expected = [f"{url}: {change}" for change in ("v0 -> v1", "v1 -> v0") for url in urls]
    # servers answer in any order
    assert sorted(line for line in lines if line.startswith("http")) == sorted(expected)
    lines = run(tmp_path, "fleet", "--url", urls[0], "--url", dead_url, *new, status=1)
    assert any(line.startswith("nothing has changed on any server") for line in lines), lines
    expect_unchanged(servers)


# ---- no server commits -----------------------------------------------------------------


def test_update_is_refused_when_one_server_has_another_version(
    servers: list[Server], fleet: Fleet, way: Proxy, checkpoints: Path
) -> None:
    """Another caller updated the second server, so ``expected_version`` fails there."""
    with Client(servers[1].url) as client:
        client.update_from_disk(str(checkpoints / "v2"), weight_version="v2")
    with pytest.raises(FleetRefused, match="'v2' is serving") as refused:
        fleet.update_from_disk(str(checkpoints / "v1"), expected_version="v0")
    report = refused.value.report
    assert (report.phase, list(report.failures), report.uncertain) == ("begin", [way.url], [])
    expect_unchanged(servers[:1])
    expect_served(servers[1], 2)


def test_update_is_refused_when_one_server_is_busy(
    servers: list[Server], fleet: Fleet, checkpoints: Path
) -> None:
    with Client(servers[1].url) as client, client.session():
        with pytest.raises(FleetRefused, match="another weight update is going on"):
            fleet.update_from_disk(str(checkpoints / "v1"))
        client.update_from_disk(str(checkpoints / "v2"))
    expect_served(servers[1], 2)
    expect_unchanged(servers[:1])


def test_update_is_refused_when_one_server_cannot_stage(
    servers: list[Server], fleet: Fleet, way: Proxy
) -> None:
    lose = "/update_weights_from_tensor"
    way.before(lose, lambda: servers[1].post("/abort_weight_update", {}))
    with pytest.raises(FleetRefused, match="is not open") as refused:
        fleet.update("tensor", **tensor_body(marker.tensors(1)))
    assert refused.value.report.phase == "stage"
    expect_unchanged(servers)


def test_update_is_refused_when_one_server_loses_its_session_before_the_seal(
    servers: list[Server], fleet: Fleet, way: Proxy
) -> None:
    def stage_and_lose() -> None:
        with fleet.session(weight_version="v1"):
            fleet.update("tensor", **tensor_body(marker.tensors(1)))
            servers[1].post("/abort_weight_update", {})

    with pytest.raises(FleetRefused, match="is not open") as refused:
        stage_and_lose()
    report = refused.value.report
    assert (report.phase, list(report.failures)) == ("seal", [way.url])
    assert isinstance(report.failures[way.url], Conflict)
    expect_unchanged(servers)


def test_seal_is_retried_when_its_answer_is_lost(
    servers: list[Server], fleet: Fleet, way: Proxy
) -> None:
    """Sealing twice equals sealing once."""
    way.lose_answer(SEAL)
    fleet.update("tensor", weight_version="v1", **tensor_body(marker.tensors(1)))
    assert way.arrivals.count(SEAL) == 2
    for server in servers:
        expect_served(server, 1)


# ---- some servers commit ---------------------------------------------------------------


def test_commit_without_an_answer_is_uncertain(
    servers: list[Server], fleet: Fleet, way: Proxy
) -> None:
    """The fleet does not retry a commit."""
    way.lose_answer(END)
    with pytest.raises(FleetSplit) as split:
        fleet.update("tensor", weight_version="v1", **tensor_body(marker.tensors(1)))
    report = split.value.report
    assert (report.phase, list(report.answers)) == ("commit", [servers[0].url])
    assert (list(report.failures), report.uncertain) == ([way.url], [way.url])
    assert way.arrivals.count(END) == 1
    assert {a["weight_version"] for a in fleet.status().answers.values()} == {"v1"}


def test_lost_commit_splits_the_fleet_until_a_rollback(
    servers: list[Server], fleet: Fleet, way: Proxy
) -> None:
    way.lose_request(END)
    with pytest.raises(FleetSplit, match="may have failed") as split:
        fleet.update("tensor", weight_version="v1", **tensor_body(marker.tensors(1)))
    expect_served(servers[0], 1)
    expect_unchanged(servers[1:])
    fleet.roll_back(only=split.value.report.answers)
    expect_unchanged(servers)


def test_server_hanging_at_the_commit_is_uncertain(servers: list[Server], way: Proxy) -> None:
    """The server may still commit when it continues."""
    hanging = servers[1].process
    way.before(END, lambda: hanging.send_signal(signal.SIGSTOP))
    try:
        with (
            Fleet([servers[0].url, way.url], timeout_s=PATIENCE_S) as fleet,
            pytest.raises(FleetSplit, match="may be split") as split,
        ):
            fleet.update("tensor", weight_version="v1", **tensor_body(marker.tensors(1)))
    finally:
        hanging.send_signal(signal.SIGCONT)
    report = split.value.report
    assert (list(report.answers), report.uncertain) == ([servers[0].url], [way.url])
    expect_served(servers[0], 1)
    until("it goes on", lambda: staging(servers[1])[0]["state"] == "empty")
    expect_served(servers[1], int(status(servers[1])["weight_version"].removeprefix("v")))


def test_server_hanging_at_the_pause_leaves_the_other_running(
    servers: list[Server], way: Proxy
) -> None:
    running = [start_running(server, 2, tokens=ENDLESS) for server in servers]
    hanging = servers[1].process
    way.before("/pause_generation", lambda: hanging.send_signal(signal.SIGSTOP))
    try:
        with Fleet([servers[0].url, way.url], timeout_s=PATIENCE_S) as fleet:
            with pytest.raises(FleetRefused) as refused, fleet.paused():
                raise AssertionError("not all are paused")
            assert refused.value.report.uncertain == [way.url]
            assert not status(servers[0])["paused"]
    finally:
        hanging.send_signal(signal.SIGCONT)
    until("it is let go of", lambda: not status(servers[1])["paused"])
    for generations in running:
        expect_all_go_on(generations)


def test_cancelled_commit_is_finished_first(servers: list[Server], way: Proxy) -> None:
    """Half a commit would split the fleet."""

    async def train() -> None:
        async with AsyncFleet([servers[0].url, way.url]) as fleet:
            update = asyncio.create_task(
                fleet.update("tensor", weight_version="v1", **tensor_body(marker.tensors(1)))
            )
            loop = asyncio.get_running_loop()
            way.before(END, lambda: loop.call_soon_threadsafe(update.cancel))
            with pytest.raises(asyncio.CancelledError):
                await update

    asyncio.run(train())
    for server in servers:
        assert status(server)["weight_version"] == "v1"
        expect_served(server, 1)


# ---- pauses ------------------------------------------------------------------------------


def test_paused_block_pauses_both_servers(servers: list[Server], fleet: Fleet) -> None:
    running = [start_running(server, 2, tokens=ENDLESS) for server in servers]
    with fleet.paused() as report:
        assert len(report.answers) == 2
        assert all(status(server)["paused"] for server in servers)
    for generations in running:
        expect_all_go_on(generations)


def test_paused_block_pauses_no_server_when_one_is_unreachable(
    servers: list[Server], dead_url: str
) -> None:
    running = [start_running(server, 2, tokens=ENDLESS) for server in servers]
    with Fleet([*(server.url for server in servers), dead_url]) as fleet:
        with pytest.raises(FleetRefused, match=dead_url), fleet.paused():
            raise AssertionError("not all are paused")
        assert list(fleet.status().failures) == [dead_url]
    assert not any(status(server)["paused"] for server in servers)
    for generations in running:
        expect_all_go_on(generations)


def test_fleet_refuses_no_server_and_duplicates() -> None:
    with pytest.raises(ValueError, match="needs a server"):
        Fleet([])
    with pytest.raises(ValueError, match="twice"):
        Fleet(["http://localhost:1", "http://localhost:1"])


# ---- the last one, because it ends the second server -------------------------------------


def test_update_is_refused_when_one_server_dies_before_the_seal(
    servers: list[Server], fleet: Fleet, way: Proxy
) -> None:
    generations = start_running(servers[0], 2, tokens=ENDLESS)
    before = serving(servers[0])

    def die() -> None:
        servers[1].process.kill()
        servers[1].process.wait()

    way.before(SEAL, die)
    with pytest.raises(FleetRefused) as refused:
        fleet.update("tensor", weight_version="v1", **tensor_body(marker.tensors(1)))
    report = refused.value.report
    assert (report.phase, list(report.failures)) == ("seal", [way.url])
    assert serving(servers[0]) == before
    expect_unchanged(servers[:1])
    expect_to_run_on(servers[0], generations, [0])
