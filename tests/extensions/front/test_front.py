"""A client at the front's one address, while servers behind it are killed and drain.

The model has random weights, so each token depends on all tokens before it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.server import PLAIN, Server
from harness.starting import STEP_MS
from harness.streams import read_event
from sglang_inflight.extensions.front.watch import PREFIX, Watch
from tests.support import random_model
from tests.support.front_process import Front, run_front
from tests.support.gateways import MODEL, send
from tests.support.load import ask, prompt, status, until
from tests.support.seats import Seats, hand_back, kill, seats
from tests.test_bench_serving import BENCHMARK_S, REQUESTS, benchmark
from tests.test_metrics import DASHBOARD

FLAGS = (
    "--weight-version", "v0", "--dtype", "float32", "--served-model-name", MODEL,
)  # fmt: skip
# slow steps give a test the time to meet a request, and cost less than more tokens
ENV = {"SGLANG_INFLIGHT_VLLM_ROUTES": "1", STEP_MS: "60"}
TOKENS = 60
GENERATE, VLLM = "/generate", "/inference/v1/generate"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = (GENERATE, VLLM, COMPLETIONS, CHAT)
_OPENAI: dict[str, Any] = {
    "model": MODEL, "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS,
}  # fmt: skip


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint v0."""
    folder = tmp_path_factory.mktemp("random")
    random_model.build(folder / "v0", 0)
    return folder


@pytest.fixture(scope="module")
def three(versions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seats]:
    """Three servers, which stream in both forms."""
    more = ((), ("--incremental-streaming-output",), ())
    with seats(versions / "v0", tmp_path_factory.mktemp("logs"), *FLAGS, more=more, env=ENV) as s:
        yield s


@pytest.fixture
def servers(three: Seats) -> list[Server]:
    """Three servers, for a test that may kill two."""
    return three.fill()


@pytest.fixture
def front(servers: list[Server], tmp_path: Path) -> Iterator[Front]:
    with run_front([server.url for server in servers], tmp_path / "front.log") as front:
        yield front


def body(path: str, *, stream: bool, **fields: Any) -> dict[str, Any]:
    if path == CHAT:
        words = [{"role": "user", "content": " ".join(f"t{token}" for token in prompt())}]
        return {**_OPENAI, "messages": words, "stream": stream, **fields}
    if path == COMPLETIONS:
        return {**_OPENAI, "prompt": prompt(), "stream": stream, "logprobs": 0, **fields}
    sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    if path == GENERATE:
        sampling["max_new_tokens"] = TOKENS
        return {"input_ids": prompt(), "sampling_params": sampling, "stream": stream, **fields}
    sampling |= {"max_tokens": TOKENS, "logprobs": 0}
    return {"token_ids": prompt(), "sampling_params": sampling, "stream": stream, **fields}


def read(
    server: Server, path: str, request: Any, *, on_start: Callable[[], object] | None = None
) -> list[Any]:
    """Return the events of a stream. ``on_start`` is called after some."""
    events: list[Any] = []
    with httpx.stream("POST", server.url + path, json=request, timeout=120, **PLAIN) as answer:
        assert answer.is_success, answer.read()
        for line in answer.iter_lines():
            if (event := read_event(line)) is not None:
                events.append(event)
            if len(events) == 5 and on_start is not None:
                on_start()
                on_start = None
    return events


def said_by(path: str, events: list[Any]) -> Any:
    """Return a stream's text or tokens."""
    if path == GENERATE:
        return events[-1]["output_ids"], events[-1]["text"]
    choices = [choice for event in events for choice in event["choices"]]
    assert not any("output_so_far" in choice for choice in choices)
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    if path == VLLM:
        return [token for choice in choices for token in choice["token_ids"]]
    if path == COMPLETIONS:
        return "".join(choice["text"] for choice in choices)
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def of_whole(path: str, answer: Any) -> Any:
    if path == GENERATE:
        return answer["output_ids"], answer["text"]
    (choice,) = answer["choices"]
    if path == VLLM:
        return choice["token_ids"]
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"]


def running(servers: list[Server]) -> Server:
    def find() -> list[Server]:
        return [server for server in servers if server.is_alive() and status(server)["running"]]

    (found,) = until("a request runs", find)
    return found


def _runs_some(server: Server) -> bool:
    return bool(status(server)["running"] > 3)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("leave", [kill, hand_back])
def test_stream_goes_on_at_another_server(
    servers: list[Server], front: Front, path: str, leave: Callable[[Server], None]
) -> None:
    request = body(path, stream=True)
    expected = said_by(path, read(servers[0], path, request))
    found = read(front, path, request, on_start=lambda: leave(running(servers)))
    assert said_by(path, found) == expected


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("leave", [kill, hand_back])
def test_whole_answer_goes_on_at_another_server(
    servers: list[Server], front: Front, path: str, leave: Callable[[Server], None]
) -> None:
    request = body(path, stream=False)
    expected = of_whole(path, send(servers[0], path, request).json())
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(send, front, path, request)
        leave(running(servers))
        answer = asked.result()
    assert answer.status_code == 200, answer.text
    assert of_whole(path, answer.json()) == expected


def test_stream_of_samples_ends_with_an_error(servers: list[Server], front: Front) -> None:
    request = body(COMPLETIONS, stream=True, n=2)
    events = read(front, COMPLETIONS, request, on_start=lambda: kill(running(servers)))
    assert "several samples does not move" in events[-1]["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_refusals_pass(front: Front, path: str) -> None:
    contract = {"exact_weight_version": "v9", "version_timeout_s": 0}
    wrong = body(path, stream=False, **{"temperature": -1} if path != GENERATE else {})
    if path in (GENERATE, VLLM):
        wrong["sampling_params"]["temperature"] = -1
    refused = send(front, path, wrong)
    assert refused.status_code == 400, refused.text
    assert "temperature" in refused.text
    unkept = send(front, path, {**body(path, stream=False), **contract})
    assert unkept.status_code == 503, unkept.text
    assert "exact_weight_version is 'v9'" in unkept.text


def test_contract_finds_its_server(servers: list[Server], front: Front) -> None:
    name = {"new_version": "v7", "abort_all_requests": False}
    send(front, COMPLETIONS, body(COMPLETIONS, stream=False, max_tokens=1))
    asked = [server.log_text().count(COMPLETIONS) for server in servers]
    # behind the front's last look at the servers
    ask(servers[2], "POST", "/update_weight_version", name)
    for _ in range(3):
        request = body(COMPLETIONS, stream=False, exact_weight_version="v7", max_tokens=8)
        answer = send(front, COMPLETIONS, request)
        assert answer.status_code == 200, answer.text
    grown = [server.log_text().count(COMPLETIONS) for server in servers]
    assert [now - was for now, was in zip(grown, asked, strict=True)] == [0, 0, 3]


def test_questions_and_aborts_reach_the_servers(servers: list[Server], front: Front) -> None:
    assert front.get("/v1/models")["data"][0]["id"] == MODEL
    request = body(GENERATE, stream=False, rid="mine")
    request["sampling_params"]["max_new_tokens"] = 5000
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(send, front, GENERATE, request)
        running(servers)
        send(front, "/abort_request", {"rid": "mine"})
        assert asked.result().json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_control_calls_are_made_at_the_servers(front: Front) -> None:
    refused = send(front, "/update_weights_from_disk", {"model_path": "/a"})
    assert refused.status_code == 404
    assert "make control calls at the servers" in refused.text
    assert send(front, GENERATE, [1]).status_code == 400
    assert httpx.post(front.url + GENERATE, content=b"{", **PLAIN).status_code == 400


def test_fleets_page_and_metrics_tell_of_a_move(servers: list[Server], front: Front) -> None:
    request = body(COMPLETIONS, stream=True)
    left: list[Server] = []

    def leave() -> None:
        left.append(running(servers))
        kill(left[0])

    read(front, COMPLETIONS, request, on_start=leave)
    told = front.get("/inflight/fleet")
    (move,) = told["rollouts"]["moves"]
    assert (move["source"], move["why"]) == (left[0].url, "failed")
    assert 0 < move["tokens"] < TOKENS
    assert told["rollouts"]["ended"] == {"whole": 1}
    assert (told["rollouts"]["running"], told["rollouts"]["moved"]) == (0, 1)
    by_url = {server["url"]: server for server in told["servers"]}
    assert by_url.keys() == {server.url for server in servers}
    assert [url for url, server in by_url.items() if not server["ready"]] == [left[0].url]
    assert {by_url[url]["weight_version"] for url in by_url.keys() - {left[0].url}} == {"v0"}
    page = httpx.get(front.url + "/", **PLAIN)
    assert page.headers["content-type"].startswith("text/html")
    assert 'fetch("inflight/fleet"' in page.text
    values = exposed(front)
    assert values['rollouts_total{end="whole"}'] == values['moves_total{why="failed"}'] == 1
    assert values["move_seconds_count{}"] == 1
    assert [values[f'server_ready{{server="{server.url}"}}'] for server in servers] == [
        server not in left for server in servers
    ]


def exposed(front: Front) -> dict[str, float]:
    """Return the front's metrics, by names without their prefix."""
    text = httpx.get(front.url + "/metrics", **PLAIN).text
    return {
        sample.name.removeprefix(PREFIX)
        + "{"
        + ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
        + "}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_dashboard_draws_exactly_the_fronts_metrics() -> None:
    shown = Watch()
    shown.watch([])
    families = {family.name.removeprefix(PREFIX) for family in shown.registry.collect()}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    drawn = {name for each in expressions for name in re.findall(PREFIX + r"(\w+)", each)}
    assert {re.sub("_(total|bucket)$", "", name) for name in drawn} == families


def test_front_without_a_ready_server_says_why(servers: list[Server], front: Front) -> None:
    for server in servers:
        hand_back(server)
    refused = until(
        "it has looked", lambda: [a for a in [front.get("/ready")] if a["status_code"] == 503]
    )
    assert "the server drains" in json.dumps(refused)


def test_bench_serving_completes_every_request_while_servers_die(
    servers: list[Server], front: Front, versions: Path, tmp_path: Path
) -> None:
    outs = {backend: tmp_path / f"{backend}.jsonl" for backend in ("sglang", "sglang-oai-chat")}
    with contextlib.ExitStack() as benchmarks:
        for backend, out in outs.items():
            benchmarks.enter_context(benchmark(front, backend, versions, out))
        for server in servers[:2]:
            runs = functools.partial(_runs_some, server)
            until("requests run there", runs, patience_s=BENCHMARK_S)
            kill(server)
    for out in outs.values():
        result = json.loads(out.read_text().splitlines()[-1])
        assert [error for error in result["errors"] if error] == []
        assert result["completed"] == REQUESTS
