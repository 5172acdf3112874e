"""A retracted request ends with the same answer as an undisturbed request.

Requests are retracted by a pause, by an update with ``recompute``, or for lack of memory.
Afterwards they run to their end, or are aborted in the queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.marker import HIDDEN, token
from harness.server import Server
from tests.support.client_answers import CHAT, COMPLETIONS, GENERATE, Asked
from tests.support.load import (
    ask,
    pass_boundaries,
    pause,
    prompt,
    resume,
    status,
    until,
    update,
)
from tests.support.pool import FLAVOURS, Flavour, ServerPool

# KV slots, enough for all requests of a test at their full length
POOL = 5120
_COMMON = (
    "--weight-version", "v0",
    "--max-total-tokens", str(POOL),
    "--max-running-requests", "32",
    "--schedule-conservativeness", "0",
    # small enough to split the second prefill of a retracted request into chunks
    "--chunked-prefill-size", "100",
    # input embeddings have no tokens to look prefixes up by
    "--disable-radix-cache",
    "--enable-return-hidden-states",
    "--chat-template", "chatml",
)  # fmt: skip
FLAVOURS["retraction"] = Flavour(_COMMON)
FLAVOURS["retraction_increments"] = Flavour(
    (*_COMMON, "--incremental-streaming-output", "--disable-overlap-schedule")
)

# tokens of a request with an end, and of one without
LENGTH, LONG = 120, 400
PROMPT = prompt(16)
EMBEDDINGS = [[((7 * i + j) % 5 - 1.5) / 4 for j in range(HIDDEN)] for i in range(16)]

Requests = dict[str, tuple[str, dict[str, Any]]]


def requests(flavour: str, tokens: int) -> Requests:
    """Return a request for each form of answer, by name."""
    per_token = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [token(0), 7]}
    params = {"temperature": 0, "max_new_tokens": tokens}
    ids = {"input_ids": PROMPT, "sampling_params": params, **per_token}
    embeddings = {"input_embeds": EMBEDDINGS, "sampling_params": params, **per_token}
    by_sevens = {"sampling_params": params | {"stream_interval": 7}}
    # each chunk repeats the hidden states of all tokens so far
    seldom = {"sampling_params": params | {"stream_interval": 40}}
    openai = {"model": "default", "temperature": 0, "max_tokens": tokens}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    completion = openai | {"prompt": " ".join(f"t{i}" for i in PROMPT), "logprobs": 1}
    chat = openai | {"messages": [{"role": "user", "content": "t5 t6"}], "logprobs": True}
    states = {"return_hidden_states": True}
    # penalties suppress every token of the marker in time, and the end token may never come
    driven = params | {"frequency_penalty": 2.0, "presence_penalty": 1.0, "min_new_tokens": tokens}
    penalized = {"stream": False, **ids, "sampling_params": driven}
    # with overlap, SGLang counts tokens for penalties from an arbitrary token on
    is_exact = flavour == "retraction_increments"
    return {
        **({"whole with penalties": (GENERATE, penalized)} if is_exact else {}),
        "whole": (GENERATE, {"stream": False, **ids, **states}),
        # the decoder of SGLang's own route accepts no "last"
        "last state": (
            COMPLETIONS,
            {"stream": False, **completion, "return_hidden_states": "last"},
        ),
        "whole of embeddings": (GENERATE, {"stream": False, **embeddings, **states}),
        "completion": (COMPLETIONS, {"stream": False, **completion}),
        "chat": (CHAT, {"stream": False, **chat}),
        "stream": (GENERATE, {"stream": True, **ids}),
        "stream of parts": (GENERATE, {"stream": True, **ids, **by_sevens}),
        "stream of embeddings": (GENERATE, {"stream": True, **embeddings, **states, **seldom}),
        "stream of a completion": (COMPLETIONS, {**completion, **usage}),
        "stream of a chat": (CHAT, {**chat, **usage}),
    }


@pytest.fixture(params=["retraction", "retraction_increments"], ids=["repeats", "increments"])
def flavour(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def server(flavour: str, pool: ServerPool) -> Iterator[Server]:
    yield pool.get(FLAVOURS[flavour])
    pool.restore()


def begin(server: Server, flavour: str, path: str, body: dict[str, Any]) -> Asked:
    return Asked(server, path, body, increments=flavour == "retraction_increments")


def retract(server: Server, checkpoints: Path, how: str) -> None:
    """Retract the requests and leave them waiting, with the server paused on the same weights."""
    if how == "pause":
        pause(server, "retract")
    elif how == "update":
        pause(server, "in_place")
        receipt = update(server, checkpoints, 0, non_blocking=True)
        assert receipt["retracted"], receipt
    else:
        until("memory drives some out", lambda: status(server)["waiting"])
        pause(server, "in_place")


@pytest.mark.parametrize("how", ["pause", "update"])
def test_retracted_beam_search_finds_the_same_beams(
    server: Server, checkpoints: Path, flavour: str, how: str
) -> None:
    # a step of a search is longer than that of other requests
    params = {"temperature": 0, "max_new_tokens": 120, "beam_width": 2}
    body = {"stream": False, "input_ids": PROMPT, "sampling_params": params}
    expected = ask(server, "POST", GENERATE, body)
    searching = begin(server, flavour, GENERATE, body)
    until("it runs", lambda: status(server)["running"])
    # beam search has made tokens, but reports none before its end
    pass_boundaries(server)
    retract(server, checkpoints, how)
    resume(server)
    found = searching.answer()
    assert found.meta["num_retractions"] == 1
    assert found.tokens == expected["output_ids"]
    # an idle scheduler ends if KV slots are unaccounted for
    pass_boundaries(server)
    assert server.is_alive()
