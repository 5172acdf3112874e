"""A request emits its given tokens, whatever its model would sample.

The marker samples one token per version, so a given token is one that no version samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.marker import VOCAB, token
from harness.server import Server
from tests.support.kv_runs import kv_runs
from tests.support.load import (
    ENDLESS,
    Generation,
    Output,
    expect_all_go_on,
    pause,
    prompt,
    requests_run_on,
    resume,
    start,
    start_running,
    update,
    versions_of,
)
from tests.support.pool import CHUNK
from tests.test_bad_requests import expect_refusal, generate

# this token ends the marker's sequences
EOS = 2
# a token of the marker is its word, perhaps behind a space
GRAMMAR = "( ?t301| ?t302)( ?t303)( ?t304)"
LIVE: dict[str, Any] = {"non_blocking": True}
# tokens of a request that goes on while its test makes a call to pause
LONG = 100
# and of one that goes on during an update, or until its test aborts it
LONGER = 250


def forced(tokens: list[int], more: int | None = None, **params: Any) -> dict[str, Any]:
    custom = {"forced_token_ids": tokens, **params.pop("custom_params", {})}
    if more is not None:
        custom["sample_after_forced"] = more
    return {"custom_params": custom, **params}


def emit(server: Server, tokens: list[int], more: int | None = None, **fields: Any) -> Generation:
    sampling = forced(tokens, more, **fields.pop("sampling", {}))
    total = len(tokens) + (more or 0)
    return Generation(server, tokens=total, sampling=sampling, **fields)


def expect_emitted(generation: Generation, tokens: list[int]) -> Output:
    output = generation.output()
    assert output.tokens[: len(tokens)] == tokens
    assert len(output.tokens) == generation.max_new_tokens, output.meta
    return output


def expect_own_tokens(server: Server, *lengths: int) -> None:
    """Give requests so many tokens each, beside requests that sample."""
    given = [prompt(length) for length in lengths]
    sampling = start(server, 2, tokens=50)
    generations = [emit(server, tokens, 7) for tokens in given]
    for generation, tokens in zip(generations, given, strict=True):
        output = expect_emitted(generation, tokens)
        assert output.tokens[len(tokens) :] == 7 * [token(0)]
    for other in sampling:
        assert other.output().tokens == 50 * [token(0)]


@pytest.mark.parametrize("stream", [True, False])
def test_request_emits_its_given_tokens(any_server: Server, stream: bool) -> None:
    tokens = prompt(40)
    expect_emitted(emit(any_server, tokens, stream=stream), tokens)


def test_given_tokens_replace_max_new_tokens(any_server: Server) -> None:
    tokens = prompt(40)
    expect_emitted(emit(any_server, tokens, sampling={"max_new_tokens": 3}), tokens)


def test_sampling_goes_on_behind_given_tokens(any_server: Server) -> None:
    tokens = prompt(20)
    output = expect_emitted(emit(any_server, tokens, 10), tokens)
    assert output.tokens[20:] == 10 * [token(0)]


def test_each_request_of_a_batch_emits_its_own_tokens(any_server: Server) -> None:
    expect_own_tokens(any_server, 5, 30, 61)


def test_samples_of_one_request_emit_the_same_tokens(any_server: Server) -> None:
    tokens = prompt(12)
    for output in emit(any_server, tokens, n=3).outputs():
        assert output.tokens == tokens


def test_prompt_of_several_chunks_and_a_cached_one(any_server: Server) -> None:
    long, tokens = prompt(3 * CHUNK + 7), prompt(9)
    for _ in range(2):
        expect_emitted(emit(any_server, tokens, input_ids=long), tokens)


def test_stops_amid_given_tokens_end_nothing(any_server: Server) -> None:
    stop = 300
    tokens = [301, EOS, 302, stop, 303, EOS, 304]
    sampling = {"ignore_eos": False, "stop_token_ids": [stop]}
    output = expect_emitted(emit(any_server, tokens, sampling=sampling), tokens)
    assert output.finish_reason == "length"


def test_stop_at_the_last_given_token_ends_as_ever(any_server: Server) -> None:
    output = emit(any_server, [301, 302, EOS], 20, sampling={"ignore_eos": False}).output()
    assert output.tokens == [301, 302, EOS]
    assert output.finish_reason == "stop"


def test_given_tokens_go_on_across_a_commit(any_server: Server, checkpoints: Path) -> None:
    tokens = prompt(LONGER)
    generation = emit(any_server, tokens, 5)
    generation.wait_for_tokens(3)
    update(any_server, checkpoints, 1, **LIVE)
    output = expect_emitted(generation, tokens)
    assert output.tokens[LONGER:] == 5 * [token(1)]
    assert versions_of(output) == ["v0", "v1"]


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_given_tokens_go_on_after_a_retraction(
    any_server: Server, checkpoints: Path, kv: str
) -> None:
    tokens = prompt(LONG)
    generation = emit(any_server, tokens, 5)
    generation.wait_for_tokens(3)
    pause(any_server, "retract")
    update(any_server, checkpoints, 1, kv_cache=kv, **LIVE)
    resume(any_server)
    output = expect_emitted(generation, tokens)
    assert output.tokens[LONG:] == 5 * [token(1)]
    assert output.meta["num_retractions"] == 1


def test_given_tokens_under_a_pinned_version(any_server: Server, checkpoints: Path) -> None:
    update(any_server, checkpoints, 1, **LIVE)
    beside = start_running(any_server, 2, tokens=ENDLESS)
    tokens = prompt(30)
    sampling = {"custom_params": {"weight_version": "v0"}}
    output = expect_emitted(emit(any_server, tokens, 4, sampling=sampling), tokens)
    assert output.tokens[30:] == 4 * [token(0)]
    assert versions_of(output) == ["v0"]
    assert {name for name, _ in kv_runs(output)} == {"v0"}
    for other in expect_all_go_on(beside):
        assert versions_of(other) == ["v1"]


def test_logprobs_are_those_of_the_given_tokens(any_server: Server) -> None:
    tokens = prompt(8)
    fields = {"return_logprob": True, "top_logprobs_num": 1}
    output = expect_emitted(emit(any_server, tokens, 1, **fields), tokens)
    chosen = output.meta["output_token_logprobs"]
    assert [id_ for _, id_, _ in chosen] == output.tokens
    for (given, _, _), ((best, best_id, _),) in zip(
        chosen[:-1], output.meta["output_top_logprobs"][:-1], strict=True
    ):
        assert best_id == token(0)
        assert given < best - 1
    assert chosen[-1][0] == output.meta["output_top_logprobs"][-1][0][0]


def test_aborted_request_ends_amid_its_given_tokens(any_server: Server) -> None:
    tokens = prompt(LONGER)
    generation = emit(any_server, tokens)
    generation.wait_for_tokens(3)
    generation.abort()
    output = generation.output()
    assert output.finish_reason == "abort"
    assert output.tokens == tokens[: len(output.tokens)]


def test_given_tokens_within_a_grammar(any_server: Server) -> None:
    sampling = {"regex": GRAMMAR, "ignore_eos": False}
    output = emit(any_server, [302, 303, 304], sampling=sampling).output()
    assert output.tokens[:3] == [302, 303, 304]


def test_given_token_outside_of_a_grammar_ends_its_request_alone(any_server: Server) -> None:
    sampling = {"regex": GRAMMAR, "ignore_eos": False}
    with requests_run_on(any_server):
        generation = emit(any_server, [302, 305, 304], sampling=sampling)
        generation.wait_for_end()
        assert generation.output_so_far().finish_reason == "abort"


@pytest.mark.parametrize(
    ("custom", "words"),
    [
        ({"forced_token_ids": []}, ("a list of token ids",)),
        ({"forced_token_ids": 7}, ("a list of token ids",)),
        ({"forced_token_ids": [5, VOCAB]}, ("[1]", f"0 to {VOCAB - 1}", f"got {VOCAB}")),
        ({"forced_token_ids": [-1]}, ("[0]", "got -1")),
        ({"forced_token_ids": [True]}, ("[0]", "got True")),
        ({"forced_token_ids": ["5"]}, ("[0]", "got '5'")),
        ({"forced_token_ids": [5], "sample_after_forced": -1}, ("0 or more", "got -1")),
        ({"forced_token_ids": [5], "sample_after_forced": 1.5}, ("0 or more", "got 1.5")),
        ({"sample_after_forced": 1}, ("needs forced_token_ids",)),
        ({"forced_token_ids": [5] * 16384}, ("2 tokens of the prompt", "context's 16384")),
        ({"forced_token_ids": [5], "sample_after_forced": 1 << 40}, ("context's 16384",)),
    ],
)
def test_wrong_given_tokens_are_refused(
    any_server: Server, custom: dict[str, Any], words: tuple[str, ...]
) -> None:
    with requests_run_on(any_server):
        expect_refusal(any_server, *generate(sampling={"custom_params": custom}), *words)


def test_beam_search_takes_no_given_tokens(any_server: Server) -> None:
    sampling = {"beam_width": 2, **forced([5, 6])}
    expect_refusal(any_server, *generate(sampling=sampling), "beam search")
