"""The trainer's client, against a server under load."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from harness import marker
from harness.server import Server, free_port
from sglang_inflight.client import AsyncClient, Client, Progress
from sglang_inflight.client.async_client import ATTEMPTS
from sglang_inflight.vocabulary.errors import Conflict, Refused
from tests.support.load import ENDLESS, expect_all_go_on, settle, start_running, status, until
from tests.support.proxy import Proxy
from tests.support.updates import (
    drop_session,
    expect_served,
    expect_to_run_on,
    serving,
    staging,
    tensor_body,
)

# expires while a test waits
SHORT_S = 0.5


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client
    drop_session(server)


# ---- pauses ------------------------------------------------------------------------------


def test_paused_block_renews_its_lease(server: Server, client: Client) -> None:
    generations = start_running(server, 2, tokens=ENDLESS)
    with client.paused("in_place", lease_s=SHORT_S) as answer:
        counts = settle(server, generations)
        renewals = _count_renewals(server, answer["pause_id"])
        next(renewals), next(renewals), next(renewals), next(renewals)
        assert settle(server, generations) == counts
    assert not client.status()["paused"]
    expect_all_go_on(generations)


def _count_renewals(server: Server, pause_id: str) -> Iterator[None]:
    """Yield each time the lease is seen to grow."""
    left = _lease_left(server, pause_id)
    while True:
        before, left = left, _lease_left(server, pause_id)
        if left > before:
            yield


def _lease_left(server: Server, pause_id: str) -> float:
    (holder,) = status(server)["holders"]
    assert holder["pause_id"] == pause_id
    left: float = holder["lease_left_s"]
    return left


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_paused_block_resumes_when_it_fails(
    server: Server, client: Client, error: type[BaseException]
) -> None:
    generations = start_running(server, 2, tokens=ENDLESS)
    with pytest.raises(error), client.paused():
        raise error
    assert not client.status()["paused"]
    expect_all_go_on(generations)


def test_paused_block_raises_when_its_pause_was_lost(server: Server, client: Client) -> None:
    """Another caller released all pauses, so part of the block ran unpaused."""
    with pytest.raises(Conflict, match="not held"), client.paused():
        client.resume()
    assert not client.status()["paused"]


def test_pause_of_a_dead_client_ends_with_its_lease(server: Server) -> None:
    generations = start_running(server, 2, tokens=ENDLESS)
    with Client(server.url) as client:
        client.pause("in_place", lease_s=SHORT_S)
    until("the lease has run out", lambda: not status(server)["paused"])
    expect_all_go_on(generations)


def test_ctrl_c_during_a_drain_stops_the_renewal(server: Server, client: Client) -> None:
    generations = start_running(server, 2, tokens=ENDLESS)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        until("the server drains", lambda: server.get("/inflight/status")["state"] == "draining")
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    # longer than busy cores take to interrupt the pause
    with pytest.raises(KeyboardInterrupt), client.paused("wait", lease_s=10 * SHORT_S):
        raise AssertionError("it has waited for requests that do not end")
    thread.join()
    until("the lease has run out", lambda: not client.status()["paused"])
    expect_all_go_on(generations)


def test_lease_begins_when_the_pause_is_granted(server: Server, client: Client) -> None:
    """The client renews no pause before the grant."""
    (generation,) = start_running(server, 1, tokens=ENDLESS)

    def end_it() -> None:
        until("the server drains", lambda: status(server)["state"] == "draining")
        assert status(server)["holders"][0]["lease_left_s"] == SHORT_S
        time.sleep(2 * SHORT_S)
        generation.abort()

    with ThreadPoolExecutor() as pool:
        ending = pool.submit(end_it)
        with client.paused("wait", lease_s=SHORT_S) as answer:
            assert answer.ranks[0].running == 0
            assert client.status().state == "frozen"
        ending.result()
    assert not client.status().paused


def test_async_paused_block_resumes_when_cancelled(server: Server) -> None:
    generations = start_running(server, 2, tokens=ENDLESS)

    async def hold(client: AsyncClient) -> None:
        async with asyncio.timeout(2 * SHORT_S), client.paused(lease_s=SHORT_S):
            assert (await client.status())["paused"]
            await asyncio.Event().wait()

    async def train() -> None:
        async with AsyncClient(server.url) as client:
            with pytest.raises(TimeoutError):
                await hold(client)
            assert not (await client.status())["paused"]

    asyncio.run(train())
    expect_all_go_on(generations)


# ---- updates -----------------------------------------------------------------------------


def test_update_and_rollback_reach_running_requests(
    server: Server, client: Client, checkpoints: Path
) -> None:
    generations = start_running(server, 2, tokens=ENDLESS)
    receipt = client.update_from_disk(str(checkpoints / "v1"), weight_version="v1")
    assert (receipt["base_version"], receipt["weight_version"]) == ("v0", "v1")
    for generation in generations:
        generation.wait_for_tokens(generation.count + 3)
    assert client.roll_back()["weight_version"] == "v0"
    expect_to_run_on(server, generations, [0, 1, 0])


def test_refused_updates_raise_and_change_nothing(
    server: Server, client: Client, checkpoints: Path
) -> None:
    before = serving(server)
    with pytest.raises(Conflict, match="v7"):
        client.update_from_disk(str(checkpoints / "v1"), expected_version="v7")
    with pytest.raises(Refused, match="not a directory"):
        client.update_from_disk("/no/such/folder")
    with pytest.raises(Refused, match="is `expected_version` meant"):
        client.update_from_disk(str(checkpoints / "v1"), expected_versoin="v0")  # type: ignore[call-arg]
    assert serving(server) == before


def test_session_goes_live_at_the_end_of_its_block(server: Server, client: Client) -> None:
    weights = marker.tensors(1)
    with client.session(weight_version="v1", partial=False) as session:
        name = {"session_id": session.session_id}
        server.post("/update_weights_from_tensor", tensor_body(weights) | name)
        expect_served(server, 0)
        assert session.receipt is None
    assert session.receipt is not None
    assert session["tensors"] == session.receipt.tensors == len(weights)
    assert session.as_json() == {**name, **session.receipt.as_json()}
    expect_served(server, 1)


def test_failed_session_changes_nothing(server: Server, client: Client) -> None:
    before = serving(server)

    def send_and_fail() -> None:
        with client.session():
            client.update("tensor", **tensor_body(marker.tensors(1)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        send_and_fail()
    assert serving(server) == before
    expect_served(server, 0)


def test_session_block_renews_its_lease(server: Server) -> None:
    """The client renews three times per lease."""
    with (
        Proxy(server).serving() as proxy,
        Client(proxy.url) as client,
        client.session(weight_version="v1", lease_s=SHORT_S),
    ):
        client.update("tensor", **tensor_body(marker.tensors(1)))
        begun = proxy.arrivals.count("/begin_weight_update")
        until(
            "two leases would have run out",
            lambda: proxy.arrivals.count("/begin_weight_update") > begun + 6,
        )
    expect_served(server, 1)


def test_session_block_raises_when_its_session_was_replaced(server: Server, client: Client) -> None:
    """Neither session takes in a tensor of the other."""
    before = serving(server)

    def send_late() -> None:
        with client.session():
            server.post("/begin_weight_update", {"non_blocking": True, "on_busy": "replace"})
            client.update("tensor", **tensor_body(marker.tensors(1)))

    with pytest.raises(Conflict, match="is not open"):
        send_late()
    assert serving(server) == before
    assert staging(server)[0]["state"] == "open"


def test_progress_reports_staged_tensors(server: Server, client: Client) -> None:
    weights = marker.tensors(1)
    heard: list[Progress] = []
    with client.session(on_progress=heard.append):
        client.update("tensor", **tensor_body(weights))
        until("all of it is reported", lambda: heard and heard[-1].tensors == len(weights))
    assert (heard[-1].url, heard[-1].state) == (server.url, "open")
    assert heard[-1].bytes == sum(tensor.nbytes for tensor in weights.values())


# ---- answers that are lost ---------------------------------------------------------------


def test_status_is_retried_when_its_answer_is_lost(server: Server) -> None:
    with Proxy(server).serving() as proxy, Client(proxy.url) as client:
        proxy.lose_answer("/inflight/status")
        assert client.status()["weight_version"] == "v0"
        assert proxy.arrivals == ["/inflight/status"] * 2


def test_pause_is_taken_once_when_its_answer_is_lost(server: Server) -> None:
    """The client chooses the id, so a retry names the same pause."""
    generations = start_running(server, 2, tokens=ENDLESS)
    with Proxy(server).serving() as proxy, Client(proxy.url) as client:
        proxy.lose_answer("/pause_generation")
        with client.paused(lease_s=60) as answer:
            (holder,) = status(server)["holders"]
            assert holder["pause_id"] == answer["pause_id"]
            assert proxy.arrivals == ["/inflight/status", *["/pause_generation"] * 2]
        assert not status(server)["paused"]
    expect_all_go_on(generations)


def test_pause_without_any_answer_is_released_at_once(server: Server) -> None:
    generations = start_running(server, 2, tokens=ENDLESS)
    with Proxy(server).serving() as proxy, Client(proxy.url) as client:
        for _ in range(ATTEMPTS):
            proxy.lose_answer("/pause_generation")
        with pytest.raises(httpx.RemoteProtocolError), client.paused(lease_s=60):
            raise AssertionError("it does not know that it is paused")
        assert not status(server)["paused"]
    expect_all_go_on(generations)


def test_session_is_begun_once_when_its_answer_is_lost(server: Server) -> None:
    with Proxy(server).serving() as proxy, Client(proxy.url) as client:
        proxy.lose_answer("/begin_weight_update")
        with client.session(weight_version="v1", lease_s=60):
            client.update("tensor", **tensor_body(marker.tensors(1)))
        assert proxy.arrivals.count("/begin_weight_update") == 2
    expect_served(server, 1)


def test_session_without_any_answer_is_dropped(server: Server) -> None:
    with Proxy(server).serving() as proxy, Client(proxy.url) as client:
        for _ in range(ATTEMPTS):
            proxy.lose_answer("/begin_weight_update")
        with pytest.raises(httpx.RemoteProtocolError), client.session(lease_s=60):
            raise AssertionError("it does not know of its session")
    assert staging(server)[0]["state"] == "empty"


def test_rollback_tried_again_does_not_undo_itself(
    server: Server, client: Client, checkpoints: Path
) -> None:
    """The first answer was lost. ``expected_version`` refuses the second call."""
    client.update_from_disk(str(checkpoints / "v1"), weight_version="v1")
    with Proxy(server).serving() as proxy, Client(proxy.url) as far:
        proxy.lose_answer("/inflight/rollback")
        with pytest.raises(httpx.RemoteProtocolError):
            far.roll_back(expected_version="v1")
        with pytest.raises(Conflict, match="v0"):
            far.roll_back(expected_version="v1")
    expect_served(server, 0)


def test_update_is_not_retried_when_its_answer_is_lost(server: Server, checkpoints: Path) -> None:
    path = "/update_weights_from_disk"
    epoch = status(server)["epoch"]
    with Proxy(server).serving() as proxy, Client(proxy.url) as client:
        proxy.lose_answer(path)
        with pytest.raises(httpx.RemoteProtocolError):
            client.update_from_disk(str(checkpoints / "v1"))
        assert proxy.arrivals == ["/inflight/status", path]
        assert client.status()["epoch"] == epoch + 1


def test_unreachable_server_raises_connect_error() -> None:
    with Client(f"http://127.0.0.1:{free_port()}") as client, pytest.raises(httpx.ConnectError):
        client.status()
