"""Rollouts of a fleet go on at another server when theirs is killed or drains.

The model has random weights, so each token depends on all tokens before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from harness.server import Server, serve
from harness.starting import STEP_MS
from sglang_inflight.client import AsyncFleet, Fleet, RolloutLost
from sglang_inflight.client.rollouts.servers import LONG_ANSWER_S, Place
from sglang_inflight.vocabulary.errors import Refused
from tests.support import random_model
from tests.support.load import ask, prompt, status, until
from tests.support.proxy import Proxy
from tests.support.seats import Seats, hand_back, kill, seats

FLAGS = ("--weight-version", "v0", "--dtype", "float32", "--max-running-requests", "8")
# slow steps give a test the time to meet a rollout, and cost less than more tokens
ENV = {STEP_MS: "60"}
LENGTH, TOKENS = 40, 60
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS}
LONG = {"max_new_tokens": 5000}


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints v0 and v1."""
    folder = tmp_path_factory.mktemp("random")
    for version in range(2):
        random_model.build(folder / f"v{version}", version)
    return folder


@pytest.fixture(scope="module")
def two(versions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seats]:
    """Two servers; each streams in another form."""
    more = ((), ("--incremental-streaming-output",))
    with seats(versions / "v0", tmp_path_factory.mktemp("logs"), *FLAGS, more=more, env=ENV) as two:
        yield two


@pytest.fixture
def servers(two: Seats) -> list[Server]:
    """Two servers, for a test that may kill one."""
    return two.fill()


@pytest.fixture
def fleet(servers: list[Server]) -> Iterator[Fleet]:
    with Fleet([server.url for server in servers]) as fleet:
        yield fleet


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def body(input_ids: Any = None, **fields: Any) -> dict[str, Any]:
    sampling = {**GREEDY, **fields.pop("sampling", {})}
    return {"input_ids": input_ids or prompt(LENGTH), "sampling_params": sampling, **fields}


def running(servers: list[Server]) -> list[Server]:
    return [server for server in servers if status(server)["running"]]


def alone(server: Server, request: dict[str, Any]) -> Any:
    """Return the answer of one server."""
    return ask(server, "POST", "/generate", request)


def expect_as_alone(answer: Any, expected: Any) -> None:
    assert answer["output_ids"] == expected["output_ids"]
    assert answer["text"] == expected["text"]
    meta = answer["meta_info"]
    assert meta["completion_tokens"] == len(answer["output_ids"])
    places = meta["servers"]
    ends = [0, *(place["end"] for place in places)]
    assert [place["start"] for place in places] == ends[:-1]
    assert ends[-1] == len(answer["output_ids"])
    spans = meta["weight_versions"]
    assert [(span["server"], span["start"], span["end"]) for span in spans] == [
        (place["server"], place["start"], place["end"]) for place in places
    ]
    if "output_token_logprobs" in meta:
        found = [logprob for logprob, *_ in meta["output_token_logprobs"]]
        logprobs = [logprob for logprob, *_ in expected["meta_info"]["output_token_logprobs"]]
        assert found == pytest.approx(logprobs, abs=1e-3)


def start(
    threads: ThreadPoolExecutor, fleet: Fleet, servers: list[Server], request: dict[str, Any]
) -> tuple[Future[Any], Server, Server]:
    """Start a rollout. Return it, its server and the other one."""
    asked = threads.submit(fleet.generate, request)
    (first,) = until("the rollout runs", lambda: running(servers))
    (other,) = (server for server in servers if server is not first)
    return asked, first, other


@pytest.mark.parametrize("fields", [{}, {"return_logprob": True, "top_logprobs_num": 2}])
def test_rollout_of_a_killed_server_goes_on_elsewhere(
    servers: list[Server], fleet: Fleet, threads: ThreadPoolExecutor, fields: dict[str, Any]
) -> None:
    request = body(**fields)
    expected = alone(servers[0], request)
    asked, first, other = start(threads, fleet, servers, request)
    kill(first)
    answer = asked.result()
    expect_as_alone(answer, expected)
    assert answer["meta_info"]["servers"][-1]["server"] == other.url


@pytest.mark.parametrize("fields", [{}, {"return_logprob": True}])
def test_rollout_of_a_draining_server_goes_on_elsewhere(
    servers: list[Server], fleet: Fleet, threads: ThreadPoolExecutor, fields: dict[str, Any]
) -> None:
    request = body(**fields)
    expected = alone(servers[0], request)
    asked, first, other = start(threads, fleet, servers, request)
    ask(first, "POST", "/inflight/drain", {"deadline_s": 0, "reason": "spot"})
    expect_as_alone(asked.result(), expected)
    assert running(servers) == []
    refused = first.post("/generate", request)
    assert refused["status_code"] == 503
    assert "the server drains (spot)" in str(refused)
    assert first.post("/inflight/drain", {"cancel": True})["draining"] is False
    assert alone(first, request)["output_ids"] == expected["output_ids"]
    assert status(other)["draining"] is None


def test_samples_of_a_batch_outlive_a_server(
    servers: list[Server], fleet: Fleet, threads: ThreadPoolExecutor
) -> None:
    prompts = [prompt(LENGTH) for _ in range(2)]
    expected = [alone(servers[0], body(each)) for each in prompts]
    asked = threads.submit(fleet.generate, body(prompts, sampling={"n": 2}))
    until("both servers run", lambda: len(running(servers)) == 2)
    kill(servers[0])
    answers = asked.result()
    assert len(answers) == 4
    for answer, of in zip(answers, [expected[0]] * 2 + [expected[1]] * 2, strict=True):
        expect_as_alone(answer, of)


def test_stream_goes_on_without_a_token_twice(servers: list[Server]) -> None:
    request = body()
    expected = alone(servers[0], request)

    async def read() -> list[dict[str, Any]]:
        answers = []
        async with AsyncFleet([server.url for server in servers]) as fleet:
            async for answer in fleet.stream(request):
                answers.append(answer)
                if len(answers) == 3:
                    by_url = {server.url: server for server in servers}
                    first = by_url[answer["meta_info"]["servers"][0]["server"]]
                    kill(first)
        return answers

    answers = asyncio.run(read())
    for earlier, later in itertools.pairwise(answers):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert later["text"].startswith(earlier["text"])
    expect_as_alone(answers[-1], expected)
    assert len(answers[-1]["meta_info"]["servers"]) == 2


def test_rollout_that_cannot_move_begins_anew(
    servers: list[Server], fleet: Fleet, threads: ThreadPoolExecutor
) -> None:
    request = body(sampling={"custom_params": {"record": "replay"}})
    expected = alone(servers[0], request)
    asked, first, other = start(threads, fleet, servers, request)
    kill(first)
    answer = asked.result()
    expect_as_alone(answer, expected)
    assert [place["server"] for place in answer["meta_info"]["servers"]] == [other.url]


def test_refused_request_is_refused_once(servers: list[Server], fleet: Fleet) -> None:
    with pytest.raises(Refused, match="vocabulary"):
        fleet.generate(body([5, 1 << 30]))


def test_rollout_that_kills_its_servers_is_lost_after_three(servers: list[Server]) -> None:
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(server).serving()) for server in servers]

        def lose_at(proxy: Proxy) -> None:
            def lose() -> None:
                lose_at(proxy)
                raise ConnectionAbortedError

            proxy.before("/generate", lose)

        for proxy in proxies:
            lose_at(proxy)
        with Fleet([proxy.url for proxy in proxies]) as fleet:
            with pytest.raises(RolloutLost, match="3 servers in a row failed"):
                fleet.generate(body())
            arrivals = [path for proxy in proxies for path in proxy.arrivals]
            assert arrivals.count("/generate") == 3


def test_client_abort_ends_the_rollout(
    servers: list[Server], fleet: Fleet, threads: ThreadPoolExecutor
) -> None:
    asked, first, _ = start(threads, fleet, servers, body(rid="mine", sampling=LONG))
    ask(first, "POST", "/abort_request", {"rid": "mine"})
    answer = asked.result()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["meta_info"]["servers"]) == 1


def test_rollout_goes_on_when_its_drained_server_is_back_before_the_client_looks(
    versions: Path,
    servers: list[Server],
    tmp_path: Path,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = body()
    expected = alone(servers[0], request)
    look = Place.look
    with contextlib.ExitStack() as stack:
        block = serve(versions / "v0", *FLAGS, log=tmp_path / "leaving.log", env=ENV)
        leaving = stack.enter_context(block)
        port = urlsplit(leaving.url).port
        lives = [leaving]

        def come_back() -> None:
            kill(leaving)
            again = serve(versions / "v0", *FLAGS, log=tmp_path / "back.log", port=port)
            lives.append(stack.enter_context(again))

        async def look_late(place: Place, patience_s: float = 2.0) -> None:
            if patience_s == LONG_ANSWER_S and len(lives) == 1:
                await asyncio.to_thread(come_back)
            await look(place, patience_s)

        with Fleet([leaving.url, servers[0].url]) as fleet:
            fleet.client.leave_out([servers[0].url])
            asked = threads.submit(fleet.generate, request)
            until("the rollout runs", lambda: running([leaving]))
            monkeypatch.setattr(Place, "look", look_late)
            hand_back(leaving)
            answer = asked.result()
        assert len(lives) == 2
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "length"
        assert answer["output_ids"] == expected["output_ids"]
        assert [place.get("why") for place in meta["servers"]] == ["drained", None]


def test_update_of_a_fleet_goes_on_without_a_draining_server(
    servers: list[Server], fleet: Fleet, versions: Path
) -> None:
    hand_back(servers[1])
    report = fleet.update_from_disk(str(versions / "v1"), weight_version="v1")
    assert report.answers.keys() == {servers[0].url}
    assert not report.failures
    assert fleet.client.left_out == {servers[1].url}
    assert status(servers[1])["weight_version"] == "v0"


def test_sigterm_with_a_grace_hands_rollouts_back(
    versions: Path, servers: list[Server], tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    env = {**ENV, "SGLANG_INFLIGHT_DRAIN_S": "0"}
    request = body()
    expected = alone(servers[0], request)
    with serve(versions / "v0", *FLAGS, log=tmp_path / "leaving.log", env=env) as leaving:
        with Fleet([leaving.url, servers[0].url]) as fleet:
            fleet.client.leave_out([servers[0].url])
            asked = threads.submit(fleet.generate, request)
            until("the rollout runs", lambda: running([leaving]))
            fleet.client.left_out = set()
            leaving.process.send_signal(signal.SIGTERM)
            answer = asked.result()
        expect_as_alone(answer, expected)
        assert answer["meta_info"]["servers"][-1]["server"] == servers[0].url
        leaving.process.wait()
