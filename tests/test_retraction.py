"""A request that is retracted has, at its end, what it would have had without.

That is so however it is retracted: by a pause, by an update that recomputes the KV of running
requests, or because there is no memory left; and whether it runs to its end then, or is aborted
while it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.marker import HIDDEN, token
from harness.server import Server
from tests.support.answers import CHAT, COMPLETIONS, GENERATE, Answer, Asked
from tests.support.load import (
    ask,
    pass_boundaries,
    pause,
    prompt,
    resume,
    status,
    until,
    until_waiting,
    update,
)
from tests.support.pool import FLAVOURS, Flavour, ServerPool

# slots, enough for all requests of a test at their full length
POOL = 16384
# a prompt that leaves so many of them that the requests of a test drive each other out
CROWDING = 13000
_COMMON = (
    "--weight-version", "v0",
    "--max-total-tokens", str(POOL),
    "--max-running-requests", "32",
    "--schedule-conservativeness", "0",
    # what is retracted is prefilled again in chunks, and what comes is not
    "--chunked-prefill-size", "256",
    # embeddings have no tokens to be looked up by
    "--disable-radix-cache",
    "--enable-return-hidden-states",
    "--chat-template", "chatml",
)  # fmt: skip
FLAVOURS["retraction"] = Flavour(_COMMON)
FLAVOURS["retraction_increments"] = Flavour(
    (*_COMMON, "--incremental-streaming-output", "--disable-overlap-schedule")
)

# of a request that runs to its end, and of one that does not
LENGTH, ENDLESS = 450, 1400
# of which SGLang tells a client that asked for no stream, when there are that many or twice
UNTOLD = 50
PROMPT = prompt(16)
EMBEDDINGS = [[((7 * i + j) % 5 - 1.5) / 4 for j in range(HIDDEN)] for i in range(16)]

Requests = dict[str, tuple[str, dict[str, Any]]]


def requests(flavour: str, tokens: int) -> Requests:
    """Each way in which a client may ask."""
    per_token = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [token(0), 7]}
    params = {"temperature": 0, "max_new_tokens": tokens}
    ids = {"input_ids": PROMPT, "sampling_params": params, **per_token}
    embeddings = {"input_embeds": EMBEDDINGS, "sampling_params": params, **per_token}
    by_sevens = {"sampling_params": params | {"stream_interval": 7}}
    # each chunk has the hidden states of all tokens so far
    seldom = {"sampling_params": params | {"stream_interval": 40}}
    openai = {"model": "default", "temperature": 0, "max_tokens": tokens}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    completion = openai | {"prompt": " ".join(f"t{i}" for i in PROMPT), "logprobs": 1}
    chat = openai | {"messages": [{"role": "user", "content": "t5 t6"}], "logprobs": True}
    states = {"return_hidden_states": True}
    # by and by every token of the marker's is driven out, and its end may not come
    driven = params | {"frequency_penalty": 2.0, "presence_penalty": 1.0, "min_new_tokens": tokens}
    penalized = {"stream": False, **ids, "sampling_params": driven}
    # under overlap it is a matter of chance from which token on SGLang counts them
    is_exact = flavour == "retraction_increments"
    return {
        **({"whole with penalties": (GENERATE, penalized)} if is_exact else {}),
        "whole": (GENERATE, {"stream": False, **ids, **states}),
        # the decoder of SGLang's own route takes no "last"
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


@pytest.fixture(scope="module")
def undisturbed(pool: ServerPool) -> Callable[[str], dict[str, Answer]]:
    """The answers to ``requests(flavour, LENGTH)``."""
    answers: dict[str, dict[str, Answer]] = {}

    def of(flavour: str) -> dict[str, Answer]:
        if flavour not in answers:
            server = pool.get(FLAVOURS[flavour])
            asked = begin_all(server, flavour, LENGTH)
            answers[flavour] = {name: each.answer() for name, each in asked.items()}
            retractions = [a.meta["num_retractions"] for a in answers[flavour].values() if a.meta]
            assert not any(retractions)
        return answers[flavour]

    return of


def begin(server: Server, flavour: str, path: str, body: dict[str, Any]) -> Asked:
    return Asked(server, path, body, increments=flavour == "retraction_increments")


def begin_all(server: Server, flavour: str, tokens: int) -> dict[str, Asked]:
    """All run: those that are no streams as long as those that are, or longer."""
    wanted = requests(flavour, tokens)
    asked: dict[str, Asked] = {}
    for is_stream in (False, True):
        # SGLang lets in together what it has memory for at its full length, and nothing afterwards
        # until a request has ended if that is not all
        pause(server, "in_place")
        running = len(asked)
        asked |= {
            name: begin(server, flavour, path, body)
            for name, (path, body) in wanted.items()
            if body["stream"] is is_stream
        }
        until_waiting(server, len(asked) - running)
        resume(server)
        until_all_run(server)
    return asked


def until_all_run(server: Server) -> None:
    until("all run", lambda: not status(server)["waiting"])


def crowd(server: Server, flavour: str) -> None:
    """Leave little memory: SGLang lets too many in, because it expects them to end early."""
    params = {"temperature": 0, "max_new_tokens": ENDLESS}
    body = {"stream": True, "input_ids": prompt(CROWDING), "sampling_params": params}
    begin(server, flavour, GENERATE, body).wait_for_tokens(1)


def retract(server: Server, checkpoints: Path, how: str) -> None:
    """Leaves the retracted requests waiting, and the server paused, whose weights are the same."""
    if how == "pause":
        pause(server, "retract")
    elif how == "update":
        pause(server, "in_place")
        receipt = update(server, checkpoints, 0, non_blocking=True)
        assert receipt["retracted"], receipt
    else:
        until("memory drives some out", lambda: status(server)["waiting"])
        pause(server, "in_place")


HOW = ("pause", "update", "memory")


def begin_and_retract(
    server: Server, checkpoints: Path, flavour: str, how: str, length: int, *, after: int
) -> dict[str, Asked]:
    """Requests of every kind that were retracted once ``after`` tokens had been streamed."""
    if how == "memory":
        crowd(server, flavour)
    asked = begin_all(server, flavour, length)
    asked["stream"].wait_for_tokens(after)
    retract(server, checkpoints, how)
    return asked


@pytest.mark.parametrize("how", HOW)
def test_what_a_retracted_request_has_at_its_end(
    server: Server,
    checkpoints: Path,
    flavour: str,
    undisturbed: Callable[[str], dict[str, Answer]],
    how: str,
) -> None:
    expected = undisturbed(flavour)
    asked = begin_and_retract(server, checkpoints, flavour, how, LENGTH, after=20)
    resume(server)
    answers = {name: each.answer() for name, each in asked.items()}
    # memory drives out some, whose answers may be of OpenAI's routes
    retractions = [a.meta["num_retractions"] for a in answers.values() if a.meta]
    assert how == "memory" or all(retractions)
    for name, answer in answers.items():
        expect_same(name, answer, expected[name])


def expect_same(name: str, answer: Answer, expected: Answer) -> None:
    for what in ("finish", "usage", "text", "tokens", "per_token"):
        assert getattr(answer, what) == getattr(expected, what), f"{name}: {what}"
    assert answer.logprobs == pytest.approx(expected.logprobs), name
    assert shape_of(answer.hidden_states) == shape_of(expected.hidden_states), name
    # not compared by pytest, which would print each number
    are_same = numbers(answer.hidden_states) == numbers(expected.hidden_states)
    assert are_same, f"{name}: hidden states"


def numbers(states: Any) -> list[float]:
    if isinstance(states, list):
        return [number for state in states for number in numbers(state)]
    return [] if states is None else [round(states, 2)]


def shape_of(states: Any) -> Any:
    """Lengths of the lists, where all in a list are of one; else those of each."""
    if not isinstance(states, list):
        return None
    inner = [shape_of(state) for state in states]
    return (len(states), inner[0]) if all(i == inner[0] for i in inner) else inner


@pytest.mark.parametrize("how", HOW)
def test_what_a_retracted_request_has_when_it_is_aborted(
    server: Server,
    checkpoints: Path,
    flavour: str,
    undisturbed: Callable[[str], dict[str, Answer]],
    how: str,
) -> None:
    whole = undisturbed(flavour)
    length = LENGTH if how == "memory" else ENDLESS
    asked = begin_and_retract(server, checkpoints, flavour, how, length, after=UNTOLD + 10)
    told_of = asked["stream"].count
    ask(server, "POST", "/abort_request", {"abort_all": True})
    resume(server)
    answers = {name: each.answer() for name, each in asked.items()}
    aborted = {name: answer for name, answer in answers.items() if answer.finish == "abort"}
    # memory lets some end before it drives out others
    assert aborted if how == "memory" else len(aborted) == len(answers)
    for name, answer in aborted.items():
        expected = whole[name]
        n = answer.usage["completion_tokens"]
        assert answer.usage["prompt_tokens"] == expected.usage["prompt_tokens"], name
        common = min(n, LENGTH)
        words, expected_words = answer.text.split(), expected.text.split()
        # some that penalties bring are special tokens, of which there is no text
        if len(expected_words) == LENGTH:
            assert len(words) == n, name
            assert words[:common] == expected_words[:common], name
        assert len(answer.logprobs) == len(expected.logprobs) * n // LENGTH, name
        if answer.meta:
            assert len(answer.tokens) == n, name
            assert answer.tokens[:common] == expected.tokens[:common], name
            assert answer.per_token == dict.fromkeys(expected.per_token, n), name
        if how != "memory":
            assert n >= told_of, f"{name}: tokens are lost"
        if "state" in name:
            assert shape_of(answer.hidden_states) == (HIDDEN, None), name
        elif expected.hidden_states is not None:
            assert len(answer.hidden_states) == n, name


@pytest.mark.parametrize("how", ["pause", "update"])
def test_a_beam_search_that_is_retracted(
    server: Server, checkpoints: Path, flavour: str, how: str
) -> None:
    params = {"temperature": 0, "max_new_tokens": LENGTH, "beam_width": 2}
    body = {"stream": False, "input_ids": PROMPT, "sampling_params": params}
    expected = ask(server, "POST", GENERATE, body)
    searching = begin(server, flavour, GENERATE, body)
    until("it runs", lambda: status(server)["running"])
    # it has tokens, of which nobody is told before its end
    pass_boundaries(server)
    retract(server, checkpoints, how)
    resume(server)
    found = searching.answer()
    assert found.meta["num_retractions"] == 1
    assert found.tokens == expected["output_ids"]
    # an idle scheduler ends where not all slots are accounted for
    pass_boundaries(server)
    assert server.is_alive()
