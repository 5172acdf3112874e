"""A router or gateway of others in front of servers, with requests of any client."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from harness import marker
from harness.server import PLAIN, Server
from harness.starting import end
from harness.streams import read_event
from tests.support.load import until

MODEL = "the-model"
NAMES = ("--weight-version", "v0", "--served-model-name", MODEL)
BY_READINESS = ("--health-check-endpoint", "/ready")
# tokens of a rollout, enough for several updates
LONG = 1000
# both ask each server each second, and believe the first answer
WATCHFUL = (
    "--policy", "round_robin", "--worker-startup-check-interval", "1",
    "--health-check-interval-secs", "1", "--health-failure-threshold", "1",
    "--health-success-threshold", "1",
)  # fmt: skip

GENERATE_PATH = "/generate"
CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0}
GENERATE: dict[str, Any] = {"input_ids": [5, 6, 7], "sampling_params": GREEDY}
_OPENAI: dict[str, Any] = {"model": MODEL, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
CHAT: dict[str, Any] = {**_OPENAI, "messages": [{"role": "user", "content": "t5 t6"}]}
COMPLETION: dict[str, Any] = {**_OPENAI, "prompt": "t5 t6"}
UNKEPT = {"exact_weight_version": "v9", "version_timeout_s": 0}


class Gateway(Server):
    """A gateway, in the place of a server: it takes requests, and knows none of our calls."""

    def healthy(self) -> set[str]:
        """Return the URLs of the servers that get requests."""
        workers = self.get("/workers").get("workers", [])
        return {worker["url"] for worker in workers if worker["is_healthy"]}


@contextlib.contextmanager
def run_gateway(
    command: Sequence[str | Path], port: int, servers: Sequence[Server], log: Path
) -> Iterator[Gateway]:
    """Run a gateway for the block. At its begin all ``servers`` get requests."""
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, process_group=0)
    gateway = Gateway(f"http://127.0.0.1:{port}", process, log)
    try:
        until("the gateway sends to all servers", lambda: _sends_to(gateway, servers))
        yield gateway
    finally:
        end(process)


def _sends_to(gateway: Gateway, servers: Sequence[Server]) -> bool:
    assert gateway.is_alive(), gateway.log_text()
    try:
        return gateway.healthy() == {server.url for server in servers}
    except httpx.ConnectError:
        return False


def send(server: Server, path: str, body: Any, timeout: float = 120) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=timeout, **PLAIN)


def expect_openai_answers(gateway: Gateway, version: int) -> None:
    """Check the text of a chat and of a completion, and the versions in their headers."""
    chat = send(gateway, CHAT_PATH, CHAT)
    assert chat.json()["choices"][0]["message"]["content"] == _words_of(version, 3)
    completion = send(gateway, COMPLETIONS_PATH, COMPLETION)
    assert completion.json()["choices"][0]["text"] == _words_of(version, 3)
    for answer in chat, completion:
        assert answer.headers["x-inflight-weight-version-start"] == f"v{version}"
        assert answer.headers["x-inflight-weight-version-end"] == f"v{version}"


def expect_openai_stream_through(gateway: Gateway, path: str, update: Callable[[], object]) -> None:
    """Check that a stream of version 0 goes on through ``update`` to version 1."""
    body = {**(CHAT if path == CHAT_PATH else COMPLETION), "max_tokens": LONG, "stream": True}
    said: list[str] = []
    updated = False
    with httpx.stream("POST", gateway.url + path, json=body, timeout=120, **PLAIN) as answer:
        for line in answer.iter_lines():
            said += _words(read_event(line))
            if len(said) >= 20 and not updated:
                update()
                updated = True
    assert answer.headers["x-inflight-weight-version-start"] == "v0"
    of_old = said.count(_words_of(0).strip())
    assert said == (_words_of(0) * of_old + _words_of(1) * (LONG - of_old)).split()
    assert 20 <= of_old < LONG


def _words(event: Any) -> list[str]:
    """Return the words of a stream's event: each is a token."""
    if not event or not event["choices"]:
        return []
    choice = event["choices"][0]
    text = choice["text"] if "text" in choice else choice["delta"].get("content")
    return (text or "").split()


def _words_of(version: int, count: int = 1) -> str:
    return f" t{marker.token(version)}" * count


def requests_of(server: Server) -> int:
    """Return how many requests a server has taken."""
    return server.log_text().count('"POST /generate ')
