"""A server dies or drains at each call of a fleet's update, under rollouts of the fleet.

Each token of the model tells the version that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.server import Server
from harness.starting import STEP_MS
from sglang_inflight.client import Fleet, FleetSplit
from sglang_inflight.vocabulary.errors import InflightError
from tests.support.kills import check
from tests.support.load import prompt, status, until
from tests.support.proxy import Proxy
from tests.support.seats import Seats, hand_back, kill, seats

TOKENS, ROLLOUTS = 36, 4
# slow steps let rollouts outlast an update, and cost less than more tokens
ENV = {STEP_MS: "140"}
# ``check`` reads a version's tokens behind the colon
OLD, NEW = "old:0", "new:1"
MORE = ((), ("--incremental-streaming-output",), ())


@pytest.fixture(scope="module")
def three(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seats]:
    logs = tmp_path_factory.mktemp("logs")
    with seats(checkpoints / "v0", logs, more=MORE, env=ENV) as three:
        yield three


def update_under_rollouts(
    servers: list[Server], folder: Path, prepare: Callable[[Proxy], object]
) -> tuple[Proxy, InflightError | None]:
    """Update the servers while rollouts run on all of them, and check the rollouts.

    Return the proxy of the last server, the victim, and the update's error.
    """
    request = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    for server in servers:
        name = {"new_version": OLD, "abort_all_requests": False}
        assert server.post("/update_weight_version", name)["success"]
    with (
        Fleet([server.url for server in servers]) as fleet,
        ThreadPoolExecutor(ROLLOUTS) as threads,
    ):
        bodies = [{"input_ids": prompt(), "sampling_params": request} for _ in range(ROLLOUTS)]
        rollouts = [threads.submit(fleet.generate, body) for body in bodies]
        until("all servers run some", lambda: all(status(s)["running"] for s in servers))
        found = update(servers, folder, prepare)
        for rollout in rollouts:
            check(rollout.result(), TOKENS)
    return found


def update(
    servers: list[Server], folder: Path, prepare: Callable[[Proxy], object]
) -> tuple[Proxy, InflightError | None]:
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(server).serving()) for server in servers]
        prepare(proxies[-1])
        with Fleet([proxy.url for proxy in proxies]) as fleet:
            try:
                fleet.update_from_disk(str(folder), weight_version=NEW, kv_cache="keep")
            except InflightError as error:
                return proxies[-1], error
        return proxies[-1], None


@pytest.mark.parametrize("leave", [kill, hand_back])
def test_rollouts_outlive_a_server_that_leaves_at_a_call_of_an_update(
    three: Seats, checkpoints: Path, leave: Callable[[Server], None]
) -> None:
    folder = checkpoints / "v1"
    clean, error = update_under_rollouts(three.fill(), folder, lambda _: None)
    assert error is None
    assert len(clean.arrivals) > 1
    calls = len(clean.arrivals)
    for call in range(calls):
        expect_whole_rollouts(three.fill(), folder, lambda proxy: proxy.before_arrival, call, leave)
    servers = three.fill()
    expect_whole_rollouts(servers, folder, lambda proxy: proxy.after_arrival, calls - 1, leave)


def expect_whole_rollouts(
    servers: list[Server],
    folder: Path,
    moments: Callable[[Proxy], dict[int, Callable[[], object]]],
    call: int,
    leave: Callable[[Server], None],
) -> None:
    *stay, victim = servers

    def prepare(proxy: Proxy) -> None:
        moments(proxy)[call] = lambda: leave(victim)

    proxy, error = update_under_rollouts(servers, folder, prepare)
    print(call, proxy.arrivals, repr(error))
    assert len(proxy.arrivals) > call
    # all that stay have committed, or none
    served = {status(server)["weight_version"] for server in stay}
    committed = error is None or isinstance(error, FleetSplit)
    assert served == {NEW if committed else OLD}, error
