"""Servers that hand parts on to each other, and servers that die or stall meanwhile."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from harness import marker
from harness.server import Server, schedulers, serve
from sglang_inflight.client import AsyncClient, Client, Fleet, Sender, shard_sender
from sglang_inflight.vocabulary.shards import Shards, read_shards
from tests.extensions.shards.trainer import (
    Failed,
    after_buckets,
    digests_of,
    make_random,
    trainer,
    whole_digests,
)
from tests.support import metrics
from tests.support.load import ENDLESS, start_running, status, until
from tests.support.updates import drop_session, expect_served, expect_to_run_on

pytest_plugins = ["tests.support.fixtures"]

RECEIVED, HANDED_ON = "received_parts_bytes_total", "handed_on_parts_bytes_total"
FLAGS = ("--weight-version", "v0", "--enable-metrics")


@pytest.fixture(scope="module")
def pair(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two servers of one layout."""
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        yield [
            stack.enter_context(serve(checkpoints / "v0", *FLAGS, log=folder / f"{at}.log"))
            for at in range(2)
        ]


@pytest.fixture
def victim(checkpoints: Path, tmp_path: Path) -> Iterator[Server]:
    """A server of their layout, which the test ends."""
    with serve(checkpoints / "v0", *FLAGS, log=tmp_path / "victim.log") as server:
        yield server


@pytest.fixture(autouse=True)
def _version_0(request: pytest.FixtureRequest, checkpoints: Path) -> Iterator[None]:
    yield
    for server in request.getfixturevalue("pair"):
        drop_session(server)
        with Client(server.url) as client:
            client.update_from_disk(str(checkpoints / "v0"), weight_version="v0")


def urls_of(servers: Sequence[Server]) -> list[str]:
    return [server.url for server in servers]


def wanted_bytes(server: Server) -> int:
    """Return the bytes of the parts that the server's first rank uses."""
    rank = httpx.get(f"{server.url}/inflight/plan").raise_for_status().json()["ranks"][0]
    found = read_shards(Shards(rank["digest"], base64.b64decode(rank["lines"])))
    return sum(
        held.regions[0].numel * getattr(torch, held.dtype).itemsize for held in found.values()
    )


def test_each_byte_comes_once_to_a_rank_and_is_handed_on_by_the_first(
    pair: list[Server], tp2_server: Server
) -> None:
    """The third server has another layout, so its ranks get their parts from the trainer."""
    servers = [*pair, tp2_server]
    tensors = dict(marker.tensors(1))
    make_random(0, tensors)
    expected = {server.url: whole_digests(server, tensors) for server in servers}
    before = [metrics.read(server) for server in pair]
    with trainer(urls_of(servers), 2) as sharded:
        sharded.send(layout="rows", version=2)
        for server in servers:
            expect_served(server, 2)
        sent = sharded.send(layout="columns", version=1, change=make_random)[0]
    assert sent == expected
    for server, was, hands_on in zip(pair, before, (True, False), strict=True):
        now = metrics.read(server)
        # two versions
        uses = 2 * wanted_bytes(server)
        came = now[RECEIVED] - was.get(RECEIVED, 0)
        assert uses <= came <= 1.05 * uses
        assert now[HANDED_ON] - was.get(HANDED_ON, 0) == (came if hands_on else 0)


def kill(server: int) -> None:
    """Kill a server's processes, and return when they are gone."""
    first = psutil.Process(server)
    processes = [*first.children(recursive=True), first]
    for process in processes:
        process.kill()
    until("the server's processes are gone", lambda: not any(map(_lives, processes)))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_amid_buckets(server: int, rank: int) -> None:
    if rank == 0:
        after_buckets(3, partial(kill, server))


def kill_before_the_group(server: int, rank: int) -> None:
    if rank == 0:
        kill(server)


def kill_before(call: str, server: int, rank: int) -> None:
    """Kill the server when rank 0 makes the first ``call`` of this name."""
    if rank != 0:
        return
    made = getattr(AsyncClient, call)

    async def kill_first(client: AsyncClient, **fields: Any) -> Any:
        if psutil.pid_exists(server) and _lives(psutil.Process(server)):
            kill(server)
        return await made(client, **fields)

    setattr(AsyncClient, call, kill_first)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "relay", "last"])
def test_killed_server_of_a_chain_is_left_out_and_the_others_commit(
    pair: list[Server], victim: Server, place: int
) -> None:
    running = [(server, start_running(server, 2, tokens=ENDLESS)) for server in pair]
    servers = [*pair]
    servers.insert(place, victim)
    with trainer(urls_of(servers), 2, leave_out_dead=True) as sharded:
        does = partial(kill_amid_buckets, victim.process.pid)
        assert sorted(sharded.send(layout="rows", version=1, does=does)[0]) == sorted(urls_of(pair))
        for server in pair:
            expect_served(server, 1)
        sharded.send(layout="rows", version=2)
    for server, generations in running:
        expect_served(server, 2)
        expect_to_run_on(server, generations, [0, 1, 2])


@pytest.mark.parametrize(
    "does",
    [kill_before_the_group, partial(kill_before, "seal"), partial(kill_before, "end")],
    ids=["group", "seal", "commit"],
)
def test_server_killed_in_another_phase_is_left_out_and_the_others_commit(
    pair: list[Server], victim: Server, does: Callable[[int, int], None]
) -> None:
    with trainer(urls_of([victim, *pair]), 2, leave_out_dead=True) as sharded:
        does = partial(does, victim.process.pid)
        assert sorted(sharded.send(layout="rows", version=1, does=does)[0]) == sorted(urls_of(pair))
    for server in pair:
        expect_served(server, 1)


def test_killed_relay_is_named_and_no_server_changes(pair: list[Server], victim: Server) -> None:
    """Without ``leave_out_dead`` the caller decides."""
    generations = start_running(pair[0], 2, tokens=ENDLESS)
    with trainer(urls_of([pair[0], victim, pair[1]]), 2) as sharded:
        does = partial(kill_amid_buckets, victim.process.pid)
        with pytest.raises(Failed) as failed:
            sharded.send(layout="rows", version=1, does=does)
        assert sorted(failed.value.by_rank) == [0, 1]
        assert all(victim.url in why for why in failed.value.by_rank.values()), failed.value
    for server in pair:
        expect_served(server, 0)
    expect_to_run_on(pair[0], generations, [0])


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_trainer_leaves_relays_serving(pair: list[Server], rank: int) -> None:
    with trainer(urls_of(pair), 2) as sharded:
        sharded.begin(layout="rows", version=1, dies=(rank, 2))
        with pytest.raises(Failed) as failed:
            sharded.end(1)
        assert [*failed.value.by_rank] == [1 - rank]
    for server in pair:
        expect_served(server, 0)
    with trainer(urls_of(pair), 2) as other:
        other.send(layout="rows", version=1, on_busy="replace")
    for server in pair:
        expect_served(server, 1)


def test_stalled_relay_is_waited_for(pair: list[Server], victim: Server) -> None:
    (scheduler,) = schedulers(victim.process.pid)
    with trainer(urls_of([pair[0], victim, pair[1]]), 2) as sharded:
        sharded.send(layout="rows", version=1)
        before = metrics.read(pair[0])[RECEIVED]
        sharded.begin(layout="rows", version=2, does=partial(stop_amid_buckets, scheduler.pid))
        until("the relay stops", lambda: scheduler.status() == psutil.STATUS_STOPPED)
        until("the first one receives", lambda: metrics.read(pair[0])[RECEIVED] > before)
        assert status(pair[0])["weight_version"] == "v1"
        os.kill(scheduler.pid, signal.SIGCONT)
        sharded.end()
    for server in (*pair, victim):
        expect_served(server, 2)


def stop_amid_buckets(scheduler: int, rank: int) -> None:
    if rank == 0:
        after_buckets(1, partial(os.kill, scheduler, signal.SIGSTOP))


def say_another_digest(rank: int) -> None:
    """Have rank 0 hear a digest that is not that of the lines."""
    _change_plan(rank, lambda found: found | {"digest": "0" * 64})


def say_other_parts(rank: int) -> None:
    """Have rank 0 hear of parts that the server's rank does not use."""

    def cut(found: dict[str, Any]) -> dict[str, Any]:
        import zlib
        from hashlib import sha256

        text = zlib.decompress(base64.b64decode(found["lines"])).splitlines(keepends=True)[:-1]
        less = b"".join(text)
        lines = base64.b64encode(zlib.compress(less)).decode()
        return found | {"digest": sha256(less).hexdigest(), "lines": lines}

    _change_plan(rank, cut)


def _change_plan(rank: int, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    if rank != 0:
        return
    name, plan = "plan", AsyncClient.plan

    async def lie(client: AsyncClient, **fields: Any) -> Any:
        # the next call hears the truth
        setattr(AsyncClient, name, plan)
        found = await plan(client, **fields)
        return found | {"ranks": [change(each) for each in found["ranks"]]}

    setattr(AsyncClient, name, lie)


def send_less(rank: int) -> None:
    """Have rank 1 send the first half of its first bucket."""
    if rank != 1:
        return
    pack = vars(shard_sender)["pack"]

    def pack_less(*args: Any) -> torch.Tensor:
        vars(shard_sender)["pack"] = pack
        row: torch.Tensor = pack(*args)
        return row[: len(row) // 2].clone()

    vars(shard_sender)["pack"] = pack_less


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (say_another_digest, "have the digest"),
        (say_other_parts, "ask for them anew"),
        (send_less, "fewer bytes than its call describes"),
    ],
)
def test_lie_about_parts_is_refused_and_the_truth_is_taken(
    pair: list[Server], does: Callable[[int], None], why: str
) -> None:
    with trainer(urls_of(pair), 2) as sharded:
        with pytest.raises(Failed) as failed:
            sharded.send(layout="rows", version=1, does=does)
        assert sorted(failed.value.by_rank) == [0, 1]
        assert all(why in each for each in failed.value.by_rank.values()), failed.value
        for server in pair:
            expect_served(server, 0)
        sharded.send(layout="rows", version=1)
    for server in pair:
        expect_served(server, 1)


def test_server_left_out_is_brought_back(
    pair: list[Server], checkpoints: Path, tmp_path: Path
) -> None:
    with Fleet(urls_of(pair)) as fleet:
        with pytest.raises(ValueError, match="no server of this fleet"):
            fleet.leave_out(["http://nowhere"])
        with pytest.raises(ValueError, match="needs a server"):
            fleet.leave_out(urls_of(pair))
        fleet.leave_out([pair[1].url])
        report = fleet.update_from_disk(str(checkpoints / "v1"), weight_version="v1")
        assert [*report.answers] == [pair[0].url]
        expect_served(pair[0], 1)
        expect_served(pair[1], 0)
        brought = fleet.catch_up(str(tmp_path), weight_version="v1")
        assert not brought.failures
        assert fleet.left_out == frozenset()
        expect_served(pair[1], 1)
        with fleet.paused() as paused:
            assert sorted(paused.answers) == sorted(urls_of(pair))


def test_changes_come_once_to_a_rank_and_are_handed_on_by_the_first(
    pair: list[Server], tp2_server: Server
) -> None:
    servers = [*pair, tp2_server]
    with trainer(urls_of(servers), 2, sparse=True) as sharded:
        sharded.send(layout="columns", version=1)
        before = [metrics.read(server) for server in pair]
        sent = sharded.send(layout="columns", version=2)[0]
    for server in servers:
        expect_served(server, 2)
    # a row of the head becomes zero, and another one becomes one: four bytes and two of each
    changes = 2 * marker.HIDDEN * 6
    for server, was, hands_on in zip(pair, before, (True, False), strict=True):
        now = metrics.read(server)
        came = now[RECEIVED] - was[RECEIVED]
        assert changes <= came <= 1.1 * changes
        assert now[HANDED_ON] - was.get(HANDED_ON, 0) == (came if hands_on else 0)
    for server in servers:
        with Client(server.url) as client, Sender(client) as sender:
            receipt = sender.send(marker.tensors(2).items(), weight_version="whole")
        assert digests_of(receipt) == sent[server.url]


def test_server_with_other_weights_has_the_fleet_get_the_whole_version(pair: list[Server]) -> None:
    with trainer(urls_of(pair), 2, sparse=True) as sharded:
        sharded.send(layout="rows", version=1)
        with Client(pair[1].url) as client, Sender(client) as sender:
            sender.send(marker.tensors(5).items(), weight_version="v1")
        sharded.send(layout="rows", version=2)
    for server in pair:
        expect_served(server, 2)


def test_others_get_changes_after_a_server_was_left_out(pair: list[Server], victim: Server) -> None:
    """The version without the dead server is whole, because its base is gone."""
    servers = [victim, *pair]
    with trainer(urls_of(servers), 2, sparse=True, leave_out_dead=True) as sharded:
        sharded.send(layout="rows", version=1)
        does = partial(kill_before_the_group, victim.process.pid)
        before = metrics.read(pair[1])[RECEIVED]
        sharded.send(layout="rows", version=2, does=does)
        whole = metrics.read(pair[1])[RECEIVED] - before
        sharded.send(layout="rows", version=3)
        assert metrics.read(pair[1])[RECEIVED] - before - whole < 0.1 * whole
    for server in pair:
        expect_served(server, 3)
