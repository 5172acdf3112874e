"""An abort ends the named request, or the whole named group, and no request with a longer name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from harness.server import Server
from tests.support.load import (
    ENDLESS,
    Generation,
    expect_aborted,
    expect_all_go_on,
    more_tokens,
    pause,
    prompt,
    resume,
    start_running,
    until_empty,
    until_waiting,
)
from tests.support.pool import FLAVOURS, Flavour, ServerPool
from tests.support.updates import Call

pytest_plugins = ["tests.support.fixtures"]

FLAVOURS["embedding_server"] = Flavour(("--is-embedding",))

# each name is a prefix of the next
NAMES = ["step", "step1", "step10"]
_grammars = itertools.count()


def start_named(server: Server, **request: Any) -> list[Generation]:
    return [Generation(server, tokens=ENDLESS, rid=name, **request) for name in NAMES]


def expect_only_the_second_to_end(named: list[Generation]) -> None:
    first, second, third = named
    expect_aborted(second)
    assert not first.has_ended
    assert not third.has_ended


def test_abort_spares_running_requests_with_a_longer_name(server: Server) -> None:
    named = start_named(server)
    more_tokens(named)
    named[1].abort()
    expect_only_the_second_to_end(named)
    expect_all_go_on([named[0], named[2]])


@pytest.mark.parametrize("kind", ["queued", "retracted", "under_a_grammar"])
def test_abort_spares_waiting_requests_with_a_longer_name(server: Server, kind: str) -> None:
    if kind == "retracted":
        named = start_named(server)
        more_tokens(named)
        pause(server, "retract")
    else:
        pause(server, "in_place")
        regex = f"(t[0-9]+|x{next(_grammars)})*"
        sampling = {"regex": regex} if kind == "under_a_grammar" else None
        named = start_named(server, sampling=sampling)
    until_waiting(server, 3)
    named[1].abort()
    expect_only_the_second_to_end(named)
    until_waiting(server, 2)
    resume(server)
    expect_all_go_on([named[0], named[2]])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_client_disconnect_spares_a_request_with_a_longer_name(
    server: Server, *, stream: bool
) -> None:
    pause(server, "in_place")
    leaving = Generation(server, tokens=8, rid="c1", stream=stream)
    staying = Generation(server, tokens=ENDLESS, rid="c12")
    until_waiting(server, 2)
    leaving.disconnect()
    until_waiting(server, 1)
    resume(server)
    expect_all_go_on([staying])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "default", "input": [5, 6, 7]}),
        ("/v1/embeddings", {"model": "default", "input": [[5, 6, 7], [5, 6]]}),
        ("/encode", {"input_ids": [5, 6, 7]}),
    ],
    ids=["embeddings", "many_embeddings", "encode"],
)
def test_aborted_embedding_answers_503(pool: ServerPool, path: str, body: dict[str, Any]) -> None:
    server = pool.get(FLAVOURS["embedding_server"])
    pause(server, "in_place")
    call = Call(server, path, body)
    until_waiting(server, 2 if path == "/v1/embeddings" and len(body["input"]) == 2 else 1)
    pause(server, "abort")
    answer = call.answer()
    assert answer["status_code"] == 503, answer
    assert "aborted" in str(answer), answer
    pool.restore()
    assert server.post(path, body)["status_code"] == 200


# ---- groups ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["samples", "batch"])
def test_abort_by_name_ends_a_whole_group(server: Server, kind: str) -> None:
    if kind == "samples":
        group = Generation(server, tokens=ENDLESS, rid="group", n=3)
    else:
        prompts = [prompt() for _ in range(3)]
        group = Generation(server, tokens=ENDLESS, rid="group", input_ids=prompts, outputs=3)
    (other,) = start_running(server, 1, tokens=ENDLESS, rid="group1")
    group.wait_for_tokens(3)
    group.abort()
    assert [output.finish_reason for output in group.outputs()] == ["abort"] * 3
    expect_all_go_on([other])


def test_abort_ends_a_group_before_its_samples_exist(server: Server) -> None:
    """SGLang creates samples after computing the prompt, which a pause prevents."""
    pause(server, "in_place")
    group = Generation(server, tokens=ENDLESS, rid="group", n=3)
    until_waiting(server, 1)
    group.abort()
    assert [output.finish_reason for output in group.outputs()] == ["abort"] * 3
    resume(server)
    until_empty(server)
