"""Event streams and their clients during a pause."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import openai
import pytest

from harness.server import PLAIN, Server
from tests.support.load import (
    ENDLESS,
    Generation,
    ask,
    expect_all_go_on,
    expect_whole,
    pause,
    resume,
    start,
    start_running,
    until,
    until_waiting,
)
from tests.support.updates import Call

# long enough to outlast a pause after the first token
TOKENS = 200
COMPLETION = {
    "model": "default",
    "prompt": [7, 8, 9],
    "max_tokens": TOKENS,
    "temperature": 0,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture
def server(normal_loop_server: Server) -> Server:
    """A server with frequent comments."""
    return normal_loop_server


def until_comments(generation: Generation, line: str, *, times: int = 2) -> None:
    until(f"{times} comments of {line!r}", lambda: generation.comments.count(line) >= times)


@pytest.mark.guards_fix
def test_streams_get_comments_while_paused(server: Server) -> None:
    """Streams before their first token get them too."""
    running = start_running(server, 1, tokens=TOKENS)
    pause(server, "in_place")
    waiting = start(server, 1, tokens=8)
    for stream in (*running, *waiting):
        until_comments(stream, ": paused mode=in_place")
    pause(server, "retract")
    for stream in (*running, *waiting):
        until_comments(stream, ": paused mode=retract")
    resume(server)
    for stream in (*running, *waiting):
        expect_whole(stream)


def test_comments_stop_when_the_lease_expires(server: Server) -> None:
    """No call tells the front end that the scheduler has resumed."""
    pause(server, "in_place", lease_s=0.5)
    (stream,) = start(server, 1, tokens=ENDLESS)
    stream.wait_for_tokens(1)
    comments = stream.comments
    # each pass lasts longer than the interval between comments
    stream.wait_for_tokens(1000)
    assert stream.comments == comments
    expect_all_go_on([stream])


def lines_of(server: Server, path: str, body: dict[str, object]) -> Iterator[str]:
    with httpx.stream("POST", server.url + path, json=body, timeout=60, **PLAIN) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                yield line


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_stream_aborted_before_its_first_token_ends_properly(server: Server, path: str) -> None:
    """The answer began with a comment."""
    pause(server, "in_place")
    sampling = {"temperature": 0, "max_new_tokens": 8}
    body: dict[str, object] = (
        {"input_ids": [7, 8], "sampling_params": sampling, "stream": True, "rid": "waits"}
        if path == "/generate"
        else {"model": "default", "prompt": [7, 8], "max_tokens": 8, "stream": True, "rid": "waits"}
    )
    lines = lines_of(server, path, body)
    assert next(lines) == ": paused mode=in_place"
    server.post("/abort_request", {"abort_all": True})
    events = [line for line in lines if not line.startswith(":")]
    assert all(line.startswith("data: ") for line in events)
    assert events[-1] == "data: [DONE]"
    assert any("bort" in line for line in events), events
    for line in events[:-1]:
        json.loads(line.removeprefix("data: "))


def test_bad_body_keeps_its_status_while_paused(server: Server) -> None:
    """An error is not turned into a stream with comments."""
    pause(server, "in_place")
    for body in ({"stream": True}, {"stream": True, "prompt": [1], "max_tokens": -1}):
        assert server.post("/v1/completions", body)["status_code"] == 400


class TestOpenAIClient:
    """The OpenAI client skips the comments."""

    @pytest.fixture
    def client(self, server: Server) -> Iterator[openai.OpenAI]:
        url = server.url + "/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client

    def test_paused_stream_continues(self, server: Server, client: openai.OpenAI) -> None:
        stream = client.completions.create(**COMPLETION)  # type: ignore[call-overload]
        text = next(stream).choices[0].text
        pause(server, "in_place")
        (witness,) = start(server, 1, tokens=1)
        until_comments(witness, ": paused mode=in_place", times=4)
        resume(server)
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text.split() == ["t100"] * TOKENS

    def test_stream_begun_in_a_pause_waits(self, server: Server, client: openai.OpenAI) -> None:
        pause(server, "retract")
        heard: list[str] = []

        def complete() -> dict[str, object]:
            stream = client.completions.create(**COMPLETION)  # type: ignore[call-overload]
            heard.extend(chunk.choices[0].text for chunk in stream)
            return {}

        call = Call.of(complete)
        until_waiting(server, 1)
        (witness,) = start(server, 1, tokens=1)
        until_comments(witness, ": paused mode=retract", times=4)
        assert not heard
        resume(server)
        call.answer()
        assert "".join(heard).split() == ["t100"] * TOKENS


@pytest.mark.guards_fix
def test_v1_loads_counts_queued_requests_while_paused(server: Server) -> None:
    """Routers read this route."""
    running = start_running(server, 1, tokens=ENDLESS)
    pause(server, "in_place")
    waiting = start(server, 2, tokens=8)

    def counts() -> tuple[int, int]:
        (load,) = ask(server, "GET", "/v1/loads")["loads"]
        return load["num_running_reqs"], load["num_waiting_reqs"]

    until("1 runs and 2 wait", lambda: counts() == (1, 2))
    pause(server, "retract")
    until("3 wait", lambda: counts() == (0, 3))
    resume(server)
    for generation in waiting:
        expect_whole(generation)
    expect_all_go_on(running)
