"""Parts that go by Mooncake's TransferEngine, over TCP, between real servers and trainers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from harness import marker
from harness.server import Server, serve
from tests.extensions.shards.test_relays import kill_amid_buckets
from tests.extensions.shards.trainer import Failed, make_random, trainer, whole_digests
from tests.support.load import ENDLESS, start_running
from tests.support.pair import why_no_pair
from tests.support.updates import expect_served, expect_to_run_on

pytest_plugins = ["tests.support.fixtures"]
pytestmark = pytest.mark.skipif(why_no_pair() is not None, reason=f"{why_no_pair()}")

V0 = ("--weight-version", "v0")
TCP = {"MC_FORCE_TCP": "1", "SGLANG_HOST_IP": "127.0.0.1"}


@pytest.fixture
def servers(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Server]]:
    """Two servers of one layout, and one whose tensors are cut in two."""
    # trainers inherit it
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    flags: list[tuple[str, ...]] = [(), (), ("--tp-size", "2")]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                serve(checkpoints / "v0", *V0, *each, log=tmp_path / f"{at}.log", env=TCP)
            )
            for at, each in enumerate(flags)
        ]


def test_parts_that_go_by_mooncake_are_those_of_whole_tensors(servers: list[Server]) -> None:
    tensors = dict(marker.tensors(1))
    make_random(0, tensors)
    expected = {server.url: whole_digests(server, tensors) for server in servers}
    with trainer([server.url for server in servers], 2, mooncake=True) as sharded:
        sharded.send(layout="rows", version=2)
        for server in servers:
            expect_served(server, 2)
        sent = sharded.send(layout="columns", version=1, change=make_random)[0]
    assert sent == expected


def test_server_killed_amid_mooncakes_transfers_is_left_out(servers: list[Server]) -> None:
    first, victim, other = servers
    generations = start_running(first, 2, tokens=ENDLESS)
    urls = [server.url for server in servers]
    with trainer(urls, 2, mooncake=True, leave_out_dead=True) as sharded:
        does = partial(kill_amid_buckets, victim.process.pid)
        answers = sharded.send(layout="rows", version=1, does=does)[0]
    assert sorted(answers) == sorted([first.url, other.url])
    expect_served(other, 1)
    expect_served(first, 1)
    expect_to_run_on(first, generations, [0, 1])


def test_killed_trainer_of_mooncakes_transfers_leaves_the_servers_serving(
    servers: list[Server],
) -> None:
    urls = [server.url for server in servers]
    with trainer(urls, 2, mooncake=True) as sharded:
        sharded.begin(layout="rows", version=1, dies=(1, 2))
        with pytest.raises(Failed) as failed:
            sharded.end(1)
        assert [*failed.value.by_rank] == [0]
    for server in servers:
        expect_served(server, 0)
    with trainer(urls, 2, mooncake=True) as other:
        other.send(layout="rows", version=1, on_busy="replace")
    for server in servers:
        expect_served(server, 1)
