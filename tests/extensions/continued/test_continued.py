"""A request that brings its output from elsewhere goes on as if it had made the output here.

The model has random weights, so each token depends on all tokens before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.server import Server
from tests.support import random_model
from tests.support.load import Generation, ask, pause, prompt, resume, status, update
from tests.support.plugins import with_plugin
from tests.support.pool import CHUNK, FLAVOURS, MAX_RUNNING, Flavour, ServerPool, add_both_loops
from tests.test_bad_requests import expect_refusal

LENGTH, BEFORE, TOKENS = 40, 25, 60
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS}
ELSEWHERE = "http://other:30000"
_FLAGS = (
    "--chunked-prefill-size", str(CHUNK),
    "--max-running-requests", str(MAX_RUNNING),
    "--weight-version", "v0",
    # in bfloat16 a prefill and a step of decoding may disagree about the likeliest token
    "--dtype", "float32",
)  # fmt: skip
_VLLM = {"SGLANG_INFLIGHT_VLLM_ROUTES": "1"}


def build(folder: Path) -> Path:
    return random_model.build(folder, 0)


LOOPS = add_both_loops("continued", Flavour(_FLAGS, _VLLM, model=build))
FLAVOURS |= {
    "continued_ranks": Flavour((*_FLAGS, "--tp-size", "2"), model=build),
    "continued_stages": Flavour(
        (*_FLAGS, "--pp-size", "2", "--pp-async-batch-depth", "1"), model=build
    ),
    "continued_attention_dp": Flavour(
        (*_FLAGS, "--tp-size", "2", "--attn-dp-size", "2"),
        with_plugin("attention_dp"),
        model=build,
    ),
    "continued_seeded": Flavour(
        (*_FLAGS, "--enable-deterministic-inference", "--attention-backend", "torch_native"),
        with_plugin("seeded"),
        model=build,
    ),
}
RANKS = ["continued_ranks", "continued_stages", "continued_attention_dp"]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints v0 and v1."""
    folder = tmp_path_factory.mktemp("random")
    for version in range(2):
        random_model.build(folder / f"v{version}", version)
    return folder


def serve(pool: ServerPool, versions: Path, flavour: str) -> Iterator[Server]:
    server = pool.get(FLAVOURS[flavour])
    update(server, versions, 0, kv_cache="recompute")
    yield server
    pool.restore()


@pytest.fixture(params=LOOPS)
def server(request: pytest.FixtureRequest, pool: ServerPool, versions: Path) -> Iterator[Server]:
    yield from serve(pool, versions, request.param)


@pytest.fixture
def one(pool: ServerPool, versions: Path) -> Iterator[Server]:
    yield from serve(pool, versions, LOOPS[0])


def made(tokens: list[int], **fields: Any) -> dict[str, Any]:
    """Return an output from elsewhere, by two versions."""
    half = len(tokens) // 2
    spans = [
        {"version": "v7", "epoch": 3, "server": ELSEWHERE, "start": 0, "end": half},
        {"version": "v8", "epoch": 4, "server": ELSEWHERE, "start": half, "end": len(tokens)},
    ]
    return {"token_ids": tokens, "weight_versions": spans, **fields}


def generate(
    server: Server, input_ids: list[int], so_far: dict[str, Any] | None = None, **fields: Any
) -> Any:
    sampling = {**GREEDY, **fields.pop("sampling", {})}
    if so_far is not None:
        sampling["custom_params"] = {"output_so_far": so_far}
    body = {"input_ids": input_ids, "sampling_params": sampling, **fields}
    return ask(server, "POST", "/generate", body)


def expect_gone_on(server: Server, input_ids: list[int] | None = None, **sampling: Any) -> None:
    """Compare an answer with that of a request that had its first tokens elsewhere."""
    input_ids = input_ids or prompt(LENGTH)
    whole = generate(server, input_ids, sampling=sampling)["output_ids"]
    # the last token may have ended it
    begun = whole[: min(BEFORE, len(whole) - 1)]
    answer = generate(server, input_ids, made(begun), sampling=sampling)
    assert answer["output_ids"] == whole
    assert answer["meta_info"]["completion_tokens"] == len(whole)


def test_request_goes_on_from_its_output(server: Server) -> None:
    expect_gone_on(server)


@pytest.mark.parametrize("flavour", RANKS)
def test_request_goes_on_on_several_ranks(pool: ServerPool, versions: Path, flavour: str) -> None:
    for server in serve(pool, versions, flavour):
        for _ in range(3):
            # a step of several ranks takes long
            expect_gone_on(server, max_new_tokens=BEFORE + 11)


@pytest.mark.parametrize(
    "penalty",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.5},
    ],
)
def test_penalties_count_the_whole_output(server: Server, penalty: dict[str, Any]) -> None:
    input_ids = prompt(LENGTH)
    # under overlap SGLang counts the prompt's last token too, so the output must have it
    often = {str(input_ids[-1]): 8.0}
    expect_gone_on(server, input_ids, logit_bias=often, **penalty)


def test_seed_decides_the_tokens_behind_an_output(pool: ServerPool, versions: Path) -> None:
    for server in serve(pool, versions, "continued_seeded"):
        expect_gone_on(server, temperature=1.0, sampling_seed=11)


def test_least_number_of_tokens_counts_the_whole_output(server: Server) -> None:
    input_ids = prompt(LENGTH)
    whole = generate(server, input_ids)["output_ids"]
    for least in (BEFORE - 5, BEFORE + 5):
        expect_gone_on(
            server,
            input_ids,
            stop_token_ids=[token for token in whole[BEFORE:] if token not in whole[:BEFORE]],
            ignore_eos=False,
            min_new_tokens=least,
        )


def test_stop_string_across_the_border_ends_the_answer(server: Server) -> None:
    input_ids = prompt(LENGTH)
    whole = generate(server, input_ids)
    tokens = whole["output_ids"]
    words = whole["text"].split(" ")
    stop = {"stop": " ".join(words[BEFORE - 2 : BEFORE + 3])}
    expected = generate(server, input_ids, sampling=stop)
    assert expected["meta_info"]["finish_reason"]["type"] == "stop"
    answer = generate(server, input_ids, made(tokens[:BEFORE]), sampling=stop)
    assert answer["text"] == expected["text"]
    assert answer["output_ids"] == expected["output_ids"]


def test_grammar_goes_on_behind_the_output(server: Server) -> None:
    grammar = {"regex": "( ?t5| ?t6)( ?t7)( ?t8)( ?t9)", "max_new_tokens": 8}
    input_ids = prompt(LENGTH)
    for first in (5, 6):
        answer = generate(server, input_ids, made([first, 7]), sampling=grammar)
        assert answer["output_ids"][:4] == [first, 7, 8, 9]


def test_output_outside_of_the_grammar_is_refused(server: Server) -> None:
    grammar = {**GREEDY, "regex": "( ?t5)( ?t6)"}
    custom = {"output_so_far": made([5, 7])}
    body = {"input_ids": prompt(), "sampling_params": {**grammar, "custom_params": custom}}
    expect_refusal(server, "/generate", body, "is not of this grammar")


def test_answer_has_given_log_probabilities_and_versions(server: Server) -> None:
    input_ids = prompt(LENGTH)
    fields: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2}
    whole = generate(server, input_ids, **fields)
    given = [-0.5 - place for place in range(BEFORE)]
    tops = [[[-0.25, 7], [-0.5, 8]] for _ in range(BEFORE)]
    so_far = made(whole["output_ids"][:BEFORE], logprobs=given, top_logprobs=tops)
    answer = generate(server, input_ids, so_far, **fields)
    meta, of_whole = answer["meta_info"], whole["meta_info"]
    logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
    assert logprobs[:BEFORE] == given
    expected = [logprob for logprob, *_ in of_whole["output_token_logprobs"]]
    assert logprobs[BEFORE:] == pytest.approx(expected[BEFORE:], abs=1e-3)
    found = [[each[:2] for each in row] for row in meta["output_top_logprobs"]]
    assert found[:BEFORE] == tops
    assert len(found) == TOKENS
    theirs, second, ours = meta["weight_versions"]
    assert [theirs, second] == so_far["weight_versions"]
    assert (ours["version"], ours["start"], ours["end"]) == ("v0", BEFORE, TOKENS)
    assert "server" not in ours


@pytest.mark.parametrize("stream", [True, False])
def test_first_chunk_has_the_output_so_far(server: Server, stream: bool) -> None:
    input_ids = prompt(LENGTH)
    whole = generate(server, input_ids)
    tokens = whole["output_ids"]
    generation = Generation(
        server, tokens=TOKENS, input_ids=input_ids, stream=stream,
        sampling={"custom_params": {"output_so_far": made(tokens[:BEFORE])}},
    )  # fmt: skip
    output = generation.output()
    assert output.tokens == tokens
    assert not stream or output.chunks[0][0] > BEFORE


def test_request_that_went_on_goes_through_commits_and_retractions(
    server: Server, versions: Path
) -> None:
    so_far = made(prompt(BEFORE), logprobs=[-1.0] * BEFORE)
    generation = Generation(
        server, tokens=200, input_ids=prompt(CHUNK + 9), return_logprob=True,
        sampling={"custom_params": {"output_so_far": so_far}},
    )  # fmt: skip
    generation.wait_for_tokens(BEFORE + 3)
    pause(server, "retract")
    resume(server)
    update(server, versions, 1, kv_cache="recompute", non_blocking=True)
    output = generation.output()
    assert output.tokens[:BEFORE] == so_far["token_ids"]
    assert len(output.tokens) == 200
    spans = output.meta["weight_versions"]
    assert [span["version"] for span in spans] == ["v7", "v8", "v0", "v1"]
    assert spans[-1]["end"] == 200
    assert len(output.meta["output_token_logprobs"]) == 200


def test_pinned_request_keeps_the_labels_of_its_first_server(server: Server) -> None:
    input_ids = prompt(LENGTH)
    tokens = generate(server, input_ids)["output_ids"]
    span = {"version": "v0", "epoch": 7, "server": ELSEWHERE, "start": 0, "end": BEFORE}
    so_far = {"token_ids": tokens[:BEFORE], "weight_versions": [span]}
    custom = {"output_so_far": so_far, "weight_version": "v0"}
    body = {"input_ids": input_ids, "sampling_params": {**GREEDY, "custom_params": custom}}
    answer = ask(server, "POST", "/generate", body)
    assert answer["output_ids"] == tokens
    theirs, ours = answer["meta_info"]["weight_versions"]
    assert theirs == span
    assert (ours["version"], ours["start"], ours["end"]) == ("v0", BEFORE, TOKENS)
    assert "server" not in ours


def test_pinned_request_with_tokens_of_other_versions_is_refused(one: Server) -> None:
    custom = {"output_so_far": made([5, 6]), "weight_version": "v0"}
    body = {"input_ids": [5, 6], "sampling_params": {**GREEDY, "custom_params": custom}}
    expect_refusal(one, "/generate", body, "weight_version 'v0' is about every token")


def test_samples_go_on_from_the_same_output(server: Server) -> None:
    input_ids = prompt(LENGTH)
    whole = generate(server, input_ids)["output_ids"]
    answers = generate(server, input_ids, made(whole[:BEFORE]), sampling={"n": 2})
    assert [answer["output_ids"] for answer in answers] == [whole, whole]


def test_prefix_of_the_output_comes_from_the_cache(server: Server) -> None:
    input_ids = prompt(LENGTH)
    whole = generate(server, input_ids)["output_ids"]
    so_far = made(whole[:BEFORE], logprobs=[-1.0] * BEFORE)
    meta = generate(server, input_ids, so_far, return_logprob=True)["meta_info"]
    assert meta["cached_tokens"] == LENGTH + BEFORE - 1


def test_request_goes_on_at_openais_and_vllms_routes(one: Server) -> None:
    input_ids = prompt(LENGTH)
    whole = generate(one, input_ids)
    tokens = whole["output_ids"]
    custom = {"output_so_far": made(tokens[:BEFORE], logprobs=[-1.0] * BEFORE)}
    sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}
    sampling["logprobs"] = 0
    body: dict[str, Any] = {
        "token_ids": input_ids,
        "sampling_params": {**sampling, "extra_args": custom},
    }
    (choice,) = ask(one, "POST", "/inference/v1/generate", body)["choices"]
    assert choice["token_ids"] == tokens
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprobs[:BEFORE] == [-1.0] * BEFORE
    body = {"model": "default", "prompt": input_ids, **sampling, "custom_params": custom}
    (choice,) = ask(one, "POST", "/v1/completions", body)["choices"]
    assert choice["text"] == whole["text"]
    assert choice["logprobs"]["token_logprobs"][:BEFORE] == [-1.0] * BEFORE


SO_FAR: dict[str, Any] = made([5, 6])
_SPAN = SO_FAR["weight_versions"][1]


@pytest.mark.parametrize(
    ("so_far", "fields", "words"),
    [
        (7, {}, ("Expected `object`",)),
        ({"token_ids": [], "weight_versions": []}, {}, ("length >= 1",)),
        ({**SO_FAR, "tokens": []}, {}, ("unknown field `tokens`",)),
        ({**SO_FAR, "token_ids": [5, 600000]}, {}, ("token 600000, outside",)),
        ({**SO_FAR, "token_ids": [5, -1]}, {}, (">= 0",)),
        ({**SO_FAR, "weight_versions": [_SPAN]}, {}, ("2 tokens in one span",)),
        ({**SO_FAR, "logprobs": [-1.0]}, {}, ("logprobs has 1 entries, for 2 tokens",)),
        (
            {**SO_FAR, "weight_versions": [{**_SPAN, "start": 0, "server": "a b"}]},
            {},
            ("has spaces",),
        ),
        (SO_FAR, {"sampling": {"max_new_tokens": 2}}, ("has 2 tokens", "max_new_tokens")),
        (SO_FAR, {"return_logprob": True}, ("return_logprob needs logprobs",)),
        (
            {**SO_FAR, "logprobs": [-1.0, -1.0]},
            {"return_logprob": True, "top_logprobs_num": 1},
            ("top_logprobs_num needs top_logprobs",),
        ),
        (
            {**SO_FAR, "logprobs": [-1.0, -1.0]},
            {"return_logprob": True, "token_ids_logprob": [5]},
            ("token_ids_logprob needs",),
        ),
        (
            {**SO_FAR, "logprobs": [-1.0, -1.0]},
            {"return_logprob": True, "logprob_start_len": 0},
            ("log probabilities of a prompt",),
        ),
    ],
)
def test_wrong_output_is_refused(
    one: Server, so_far: Any, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    custom = {"output_so_far": so_far}
    sampling = {"max_new_tokens": 8, "custom_params": custom, **fields.get("sampling", {})}
    body = {**fields, "input_ids": [5, 6], "sampling_params": sampling}
    body.pop("sampling", None)
    expect_refusal(one, "/generate", body, "output_so_far", *words)
    assert status(one)["capabilities"]["continued"] is None
