"""SGLang's own router in front of two servers that a ``Fleet`` updates.

The router takes requests alone. Updates go to the servers, as do questions about one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

import harness.server
from harness import marker
from harness.server import PLAIN, Server, free_port, serve
from harness.starting import end
from sglang_inflight.client import Fleet, Sender
from tests.support.gateways import (
    BY_READINESS,
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    GENERATE,
    GREEDY,
    LONG,
    NAMES,
    UNKEPT,
    WATCHFUL,
    Gateway,
    expect_openai_answers,
    expect_openai_stream_through,
    requests_of,
    run_gateway,
    send,
)
from tests.support.load import (
    expect_whole,
    more_tokens,
    pause,
    resume,
    start,
    start_running,
    status,
    until,
    until_waiting,
    versions_of,
)
from tests.support.pair import serve_pair, why_no_pair
from tests.support.updates import expect_served
from tests.trainers.environment import python_of

# not ready before its first update
REQUIRE_UPDATE = {"SGLANG_INFLIGHT_REQUIRE_UPDATE": "1"}


@contextlib.contextmanager
def route(
    servers: Sequence[Server], *flags: str, log: Path, named_by: Sequence[str] | None = None
) -> Iterator[Gateway]:
    """Run a router for the block. At its begin all ``servers`` get requests.

    ``named_by`` are other flags that name the servers to the router.
    """
    port = free_port()
    command: list[str | Path] = [
        python_of("router"), "-m", "sglang_router.launch_router",
        *(named_by or ("--worker-urls", *(server.url for server in servers))),
        "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
        *WATCHFUL, *flags,
    ]  # fmt: skip
    with run_gateway(command, port, servers, log) as router:
        yield router


@pytest.fixture(scope="module")
def needs_router() -> None:
    python_of("router")


@pytest.fixture(scope="module")
def servers(
    needs_router: None, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    logs = tmp_path_factory.mktemp("servers")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(serve(checkpoints / "v0", *NAMES, log=logs / f"{index}.log"))
            for index in range(2)
        ]


@pytest.fixture
def fleet(servers: list[Server], checkpoints: Path) -> Iterator[Fleet]:
    """A fleet at version 0."""
    with Fleet([server.url for server in servers]) as fleet:
        fleet.update_from_disk(str(checkpoints / "v0"), weight_version="v0")
        yield fleet


@pytest.fixture(scope="module")
def router(servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A router that asks the servers whether they are ready."""
    log = tmp_path_factory.mktemp("router") / "router.log"
    with route(servers, *BY_READINESS, log=log) as router:
        yield router


@pytest.fixture(scope="module")
def router_by_health(
    servers: list[Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A router with the endpoint that it asks by default, ``/health``."""
    log = tmp_path_factory.mktemp("router") / "by_health.log"
    with route(servers, log=log) as router:
        yield router


# ---- updates -----------------------------------------------------------------------------


def test_streams_through_the_router_go_on_through_updates(
    servers: list[Server], router: Gateway, fleet: Fleet, checkpoints: Path
) -> None:
    streams = start_running(router, 6, tokens=LONG)
    whole = start(router, 6, tokens=LONG, stream=False)
    fleet.update_from_disk(str(checkpoints / "v1"), weight_version="v1")
    with Sender(fleet) as sender:
        for version in 2, 3:
            more_tokens(streams)
            sender.send(marker.tensors(version).items(), weight_version=f"v{version}")
    for generation in streams + whole:
        versions = versions_of(expect_whole(generation))
        assert versions == sorted(versions)
        assert len(versions) > 1, "the rollout ended before an update"
    assert all(requests_of(server) >= 5 for server in servers)


def test_openai_answers_name_their_versions_through_updates(
    router: Gateway, fleet: Fleet, checkpoints: Path
) -> None:
    """The router passes our headers, also of a stream's beginning."""
    for version in 0, 1, 2:
        if version:
            fleet.update_from_disk(str(checkpoints / f"v{version}"), weight_version=f"v{version}")
        for _ in range(2):
            expect_openai_answers(router, version)


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
def test_openai_streams_go_on_through_an_update(
    router: Gateway, fleet: Fleet, checkpoints: Path, path: str
) -> None:
    v1 = str(checkpoints / "v1")
    expect_openai_stream_through(
        router, path, lambda: fleet.update_from_disk(v1, weight_version="v1")
    )


# ---- our fields and routes ---------------------------------------------------------------


def test_completions_through_the_router_keep_their_contract(router: Gateway, fleet: Fleet) -> None:
    for fields in UNKEPT, {"custom_params": UNKEPT}:
        refused = send(router, COMPLETIONS_PATH, {**COMPLETION, **fields})
        assert refused.status_code == 503, refused.text
        assert "exact_weight_version is 'v9'" in refused.text
        assert refused.headers["x-inflight-weight-version"] == "v0"
    served = send(router, COMPLETIONS_PATH, {**COMPLETION, **UNKEPT, "exact_weight_version": "v0"})
    assert served.status_code == 200, served.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {**GENERATE, **UNKEPT}),
        (
            "/generate",
            {**GENERATE, "sampling_params": {**GREEDY, "custom_params": UNKEPT}},
        ),
        ("/generate", {**GENERATE, "weight_version": "v9"}),
        (CHAT_PATH, {**CHAT, **UNKEPT}),
        (CHAT_PATH, {**CHAT, "custom_params": UNKEPT}),
        (CHAT_PATH, {**CHAT, "weight_version": "v9"}),
    ],
)
def test_router_drops_contracts_of_other_routes(
    servers: list[Server], router: Gateway, fleet: Fleet, path: str, body: dict[str, Any]
) -> None:
    """The server cannot refuse what the router has dropped; the answer's headers tell it."""
    assert send(servers[0], path, body).status_code in (409, 503)
    answer = send(router, path, body)
    assert answer.status_code == 200, "this router passes contracts: say so in docs/frameworks.md"
    assert answer.headers["x-inflight-weight-version-start"] == "v0"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/inflight/status"),
        ("GET", "/inflight/wait"),
        ("GET", "/ready"),
        ("POST", "/update_weights_from_disk"),
        ("POST", "/update_weights_from_tensor"),
        ("POST", "/update_weights_from_distributed"),
        ("POST", "/init_weights_update_group"),
        ("POST", "/begin_weight_update"),
        ("POST", "/pause_generation"),
        ("POST", "/continue_generation"),
        ("POST", "/release_memory_occupation"),
        ("POST", "/abort_request"),
    ],
)
def test_control_calls_end_at_the_router(router: Gateway, method: str, path: str) -> None:
    """Updates and pauses go to each server: a router would give them to one of them."""
    answer = httpx.request(method, router.url + path, timeout=60, **PLAIN)
    assert answer.status_code == 404, answer.text


# ---- servers that cannot serve -----------------------------------------------------------


def test_router_that_asks_for_readiness_leaves_out_a_paused_server(
    servers: list[Server], router: Gateway, fleet: Fleet
) -> None:
    pause(servers[0], "in_place")
    until("the paused server is left out", lambda: router.healthy() == {servers[1].url})
    for _ in range(6):
        assert send(router, "/generate", GENERATE).status_code == 200
    assert status(servers[0])["waiting"] == 0
    resume(servers[0])
    until("it is back", lambda: router.healthy() == {server.url for server in servers})


def test_router_that_asks_for_health_sends_to_a_paused_server(
    servers: list[Server], router_by_health: Gateway, fleet: Fleet
) -> None:
    """Half of the requests wait there, and none is lost."""
    pause(servers[0], "in_place")
    waiting = start(router_by_health, 6, tokens=5)
    until_waiting(servers[0], 3)
    assert len(router_by_health.healthy()) == 2
    resume(servers[0])
    for generation in waiting:
        expect_whole(generation)


def test_killed_server_gets_requests_again_at_the_version_of_the_others(
    servers: list[Server],
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The router sends its requests again to the other server, except for begun streams."""
    third, fourth = tmp_path / "third.log", tmp_path / "fourth.log"
    with serve(checkpoints / "v0", *NAMES, log=third) as server:
        both = [servers[1], server]
        with route(both, *BY_READINESS, log=tmp_path / "router.log") as router:
            with Fleet([each.url for each in both]) as fleet:
                fleet.update_from_disk(str(checkpoints / "v1"), weight_version="v1")
            streams = start_running(router, 2, tokens=LONG)
            rollouts = start(router, 6, tokens=LONG, stream=False)
            until("both servers run rollouts", lambda: all(status(s)["running"] for s in both))
            end(server.process)
            for generation in rollouts:
                assert versions_of(expect_whole(generation)) == ["v1"]
            for stream in streams:
                stream.wait_for_end()
            assert sorted(stream.output_so_far().endings for stream in streams) == [0, 1]
            until("the dead server is left out", lambda: router.healthy() == {servers[1].url})
            monkeypatch.setattr(harness.server, "free_port", lambda: urlsplit(server.url).port)
            with serve(checkpoints / "v0", *NAMES, log=fourth, env=REQUIRE_UPDATE) as again:
                assert again.url == server.url
                for _ in range(4):
                    expect_served(router, 1)
                assert router.healthy() == {servers[1].url}
                with Fleet([each.url for each in both]) as fleet:
                    fleet.update_from_disk(str(checkpoints / "v2"), weight_version="v2")
                until("it gets requests", lambda: len(router.healthy()) == 2)
                for _ in range(4):
                    expect_served(router, 2)
                assert requests_of(again)


# ---- a prefill and a decode server -------------------------------------------------------


@pytest.mark.skipif(why_no_pair() is not None, reason=str(why_no_pair()))
def test_pair_behind_the_router_goes_on_through_an_update(
    needs_router: None, checkpoints: Path, tmp_path: Path
) -> None:
    """KV goes over TCP from the prefill server to the decode server."""
    with serve_pair(checkpoints / "v0", *NAMES, folder=tmp_path) as pair:
        named = (
            "--pd-disaggregation",
            *("--prefill", pair.prefill.url, str(pair.bootstrap_port)),
            *("--decode", pair.decode.url),
        )
        with (
            route(pair.servers, *BY_READINESS, log=tmp_path / "r.log", named_by=named) as router,
            Fleet([server.url for server in pair.servers]) as fleet,
        ):
            streams = start_running(router, 3, tokens=LONG)
            fleet.update_from_disk(str(checkpoints / "v1"), weight_version="v1")
            for stream in streams:
                assert versions_of(expect_whole(stream)) == ["v0", "v1"]
            expect_served(router, 1)
