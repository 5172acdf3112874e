"""Requests that are retracted, and prefilled again or aborted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.marker import HIDDEN
from harness.server import Server
from tests.support.client_answers import GENERATE, Answer, Asked
from tests.support.load import (
    ask,
    pause,
    prompt,
    resume,
    status,
    until,
    until_waiting,
)
from tests.support.pool import FLAVOURS, ServerPool
from tests.test_retraction import LENGTH, LONG, begin, requests, retract
from tests.test_retraction import flavour as flavour
from tests.test_retraction import server as server

# prompts that leave too few slots for the requests of a test, by half of their length
CROWDING = (1020,) * 4


# the scheduler reports a non-streaming request's tokens at multiples of this count
UNTOLD = 50


@pytest.fixture(scope="module")
def undisturbed(pool: ServerPool) -> Callable[[str], dict[str, Answer]]:
    """Answers to ``requests(flavour, LENGTH)`` without a retraction."""
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


def begin_all(server: Server, flavour: str, tokens: int) -> dict[str, Asked]:
    """Start all requests, first the ones without a stream, and wait until all run."""
    wanted = requests(flavour, tokens)
    asked: dict[str, Asked] = {}
    for is_stream in (False, True):
        # SGLang admits a batch together if memory suffices for its full length, and otherwise
        # admits the rest only after a request has ended
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
    """Fill the memory. SGLang admits too many requests because it expects early ends."""
    params = {"temperature": 0, "max_new_tokens": LONG}
    crowding = [
        begin(
            server,
            flavour,
            GENERATE,
            {"stream": True, "input_ids": prompt(length), "sampling_params": params},
        )
        for length in CROWDING
    ]
    for each in crowding:
        each.wait_for_tokens(1)


HOW = ("pause", "update", "memory")


def begin_and_retract(
    server: Server, checkpoints: Path, flavour: str, how: str, length: int, *, after: int
) -> dict[str, Asked]:
    """Start requests of every kind, and retract them after ``after`` streamed tokens."""
    if how == "memory":
        crowd(server, flavour)
    asked = begin_all(server, flavour, length)
    asked["stream"].wait_for_tokens(after)
    retract(server, checkpoints, how)
    return asked


@pytest.mark.parametrize("how", HOW)
def test_retracted_request_ends_like_an_undisturbed_one(
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
    # memory retracts only some, and answers of OpenAI's routes do not count retractions
    retractions = [a.meta["num_retractions"] for a in answers.values() if a.meta]
    assert any(retractions) if how == "memory" else all(retractions)
    for name, answer in answers.items():
        expect_same(name, answer, expected[name])


def expect_same(name: str, answer: Answer, expected: Answer) -> None:
    for what in ("finish", "usage", "text", "tokens", "per_token"):
        assert getattr(answer, what) == getattr(expected, what), f"{name}: {what}"
    assert answer.logprobs == pytest.approx(expected.logprobs), name
    assert shape_of(answer.hidden_states) == shape_of(expected.hidden_states), name
    # pytest's comparison would print each number
    are_same = numbers(answer.hidden_states) == numbers(expected.hidden_states)
    assert are_same, f"{name}: hidden states"


def numbers(states: Any) -> list[float]:
    if isinstance(states, list):
        return [number for state in states for number in numbers(state)]
    return [] if states is None else [round(states, 2)]


def shape_of(states: Any) -> Any:
    """Return (length, inner shape) for lists of one shape, otherwise each element's shape."""
    if not isinstance(states, list):
        return None
    inner = [shape_of(state) for state in states]
    return (len(states), inner[0]) if all(i == inner[0] for i in inner) else inner


@pytest.mark.parametrize("how", HOW)
def test_retracted_request_keeps_all_it_had_when_aborted(
    server: Server,
    checkpoints: Path,
    flavour: str,
    undisturbed: Callable[[str], dict[str, Answer]],
    how: str,
) -> None:
    whole = undisturbed(flavour)
    length = LENGTH if how == "memory" else LONG
    asked = begin_and_retract(server, checkpoints, flavour, how, length, after=UNTOLD + 10)
    told_of = asked["stream"].count
    ask(server, "POST", "/abort_request", {"abort_all": True})
    resume(server)
    answers = {name: each.answer() for name, each in asked.items()}
    aborted = {name: answer for name, answer in answers.items() if answer.finish == "abort"}
    # under memory pressure some requests end before others are retracted
    assert aborted if how == "memory" else len(aborted) == len(answers)
    for name, answer in aborted.items():
        expected = whole[name]
        n = answer.usage["completion_tokens"]
        assert answer.usage["prompt_tokens"] == expected.usage["prompt_tokens"], name
        common = min(n, LENGTH)
        words, expected_words = answer.text.split(), expected.text.split()
        # penalties produce special tokens, which have no text
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
