"""TRL's requests to the OpenAI routes."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

from harness import marker
from harness.server import PLAIN, Server
from tests.support import trl
from tests.support.load import ask, prompt

pytest_plugins = ["tests.support.fixtures"]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENS = 5
# at this temperature other tokens have hardly any chance
GREEDY: dict[str, Any] = {"temperature": 0.01, "max_tokens": TOKENS, "ignore_eos": True}
SAID = [marker.token(0)] * TOKENS


@pytest.fixture
def model(vllm_server: Server) -> str:
    """The model's name, read from ``/v1/models`` as TRL does."""
    name: str = ask(vllm_server, "GET", "/v1/models")["data"][0]["id"]
    return name


def test_generation_answers_prompt_by_prompt_with_token_ids(
    vllm_server: Server, model: str
) -> None:
    prompts = [prompt(3), prompt(7)]
    answer = ask(vllm_server, "POST", COMPLETIONS, trl.generation(model, prompts, n=2, **GREEDY))
    choices = answer["choices"]
    assert [choice["prompt_token_ids"] for choice in choices[::2]] == prompts
    assert [choice["token_ids"] for choice in choices] == [SAID] * 4
    for choice in choices:
        values, ids = trl.read_logprobs(choice["logprobs"])
        assert ids == [[token] for token in SAID]
        assert [len(each) for each in values] == [1] * TOKENS


@pytest.mark.parametrize("count", [0, 1, 3])
def test_top_logprobs_include_the_token_itself(vllm_server: Server, model: str, count: int) -> None:
    body = trl.generation(model, [prompt()], **GREEDY, logprobs=count)
    body |= {"temperature": 100.0, "seed": 7}
    (choice,) = ask(vllm_server, "POST", COMPLETIONS, body)["choices"]
    own = choice["logprobs"]["token_logprobs"]
    for token, value, likely in zip(
        choice["token_ids"], own, choice["logprobs"]["top_logprobs"], strict=True
    ):
        assert likely[f"token_id:{token}"] == value
        assert len(likely) in (max(count, 1), count + 1)
    _, ids = trl.read_logprobs(choice["logprobs"])
    assert [set(at) & {token} for at, token in zip(ids, choice["token_ids"], strict=True)] == [
        {token} for token in choice["token_ids"]
    ]


def test_chat_answers_with_token_ids(vllm_server: Server, model: str) -> None:
    answer = ask(vllm_server, "POST", CHAT, trl.chat(model, "t5 t6", n=2, **GREEDY))
    assert answer["prompt_token_ids"] == [5, 6]
    assert [choice["token_ids"] for choice in answer["choices"]] == [SAID] * 2
    for choice in answer["choices"]:
        _, ids = trl.read_logprobs(choice["logprobs"])
        assert ids == [[token] for token in SAID]


def test_rollout_answers_with_tokens_and_logprobs(vllm_server: Server, model: str) -> None:
    body = trl.rollout(model, prompt(), **GREEDY)
    tokens, logprobs = trl.read_rollout(ask(vllm_server, "POST", COMPLETIONS, body))
    assert tokens == SAID
    assert len(logprobs) == TOKENS
    assert all(-1 < value <= 0 for value in logprobs)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_structured_outputs_regex_restricts_tokens(
    vllm_server: Server, model: str, path: str
) -> None:
    make = trl.generation if path == COMPLETIONS else trl.chat
    asked: Any = [prompt()] if path == COMPLETIONS else "t5"
    body = make(model, asked, max_tokens=2, structured_outputs={"regex": "t7 ?t9"})
    (choice,) = ask(vllm_server, "POST", path, body)["choices"]
    assert choice["token_ids"] == [7, 9]


def test_stream_names_tokens_by_id(vllm_server: Server, model: str) -> None:
    body = trl.generation(model, [prompt()], **GREEDY, stream=True)
    with httpx.stream("POST", vllm_server.url + COMPLETIONS, json=body, timeout=60, **PLAIN) as got:
        lines = [line.removeprefix("data: ") for line in got.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    logprobs = [json.loads(line)["choices"][0]["logprobs"] for line in lines]
    names = [name for each in logprobs if each for name in each["tokens"]]
    assert names == [f"token_id:{token}" for token in SAID]


def test_tokens_are_texts_unless_ids_are_asked_for(vllm_server: Server, model: str) -> None:
    """A request for ids may run beside, or come before."""
    body = trl.generation(model, [prompt()], **GREEDY)
    ask(vllm_server, "POST", COMPLETIONS, body)
    del body["return_tokens_as_token_ids"]
    (choice,) = ask(vllm_server, "POST", COMPLETIONS, body)["choices"]
    assert choice["logprobs"]["tokens"] == [f"t{token}" for token in SAID]


@pytest.mark.parametrize(
    ("path", "word", "fields"),
    [
        (COMPLETIONS, "prompt_logprobs", {"prompt_logprobs": -1}),
        (COMPLETIONS, "prompt_logprobs", {"prompt_logprobs": marker.VOCAB + 1}),
        (COMPLETIONS, "prompt_logprobs", {"prompt_logprobs": True}),
        (COMPLETIONS, "prompt_logprobs", {"prompt_logprobs": "5"}),
        (COMPLETIONS, "stream", {"prompt_logprobs": 0, "stream": True}),
        (CHAT, "prompt_logprobs", {"prompt_logprobs": 5}),
        (CHAT, "chat_template", {"chat_template": "{{ messages }}"}),
        (CHAT, "add_generation_prompt", {"add_generation_prompt": False}),
        (COMPLETIONS, "add_special_tokens", {"add_special_tokens": False}),
        (COMPLETIONS, "true or false", {"return_tokens_as_token_ids": "yes"}),
        (CHAT, "true or false", {"include_stop_str_in_output": "no"}),
        (COMPLETIONS, "bad_words", {"bad_words": ["t5"]}),
        (CHAT, "allowed_token_ids", {"allowed_token_ids": [5]}),
        (COMPLETIONS, "structured_outputs.choice", {"structured_outputs": {"choice": ["t5"]}}),
        (CHAT, "structured_outputs", {"structured_outputs": "t5"}),
        (
            COMPLETIONS,
            "structured_outputs.regex",
            {"structured_outputs": {"regex": "a"}, "regex": "b"},
        ),
        (COMPLETIONS, "guided_regex", {"guided_regex": "t5"}),
    ],
)
def test_unsupported_fields_are_refused(
    vllm_server: Server, model: str, path: str, word: str, fields: dict[str, Any]
) -> None:
    body = trl.rollout(model, prompt()) if path == COMPLETIONS else trl.chat(model, "t5")
    refused = vllm_server.post(path, {**body, **fields})
    assert refused["status_code"] == 400, refused
    assert word in refused["error"]["message"]
    assert vllm_server.post(path, body)["status_code"] == 200


def test_teacher_scores_sequences_by_their_own_and_likeliest_tokens(
    vllm_server: Server, model: str
) -> None:
    sequences = [[*prompt(3), marker.token(0)], prompt(7), [5, marker.VOCAB - 1]]
    answer = ask(vllm_server, "POST", COMPLETIONS, trl.scoring(model, sequences))
    for sequence, choice in zip(sequences, answer["choices"], strict=True):
        body = {"input_ids": sequence, "return_logprob": True, "logprob_start_len": 0}
        meta = ask(vllm_server, "POST", "/generate", {**body, "top_logprobs_num": 100})["meta_info"]
        assert choice["prompt_logprobs"][0] is None
        scores = trl.read_scores(choice, sequence, 1)
        own = [value for value, _, _ in meta["input_token_logprobs"]]
        tops = [[token for _, token, _ in top or ()] for top in meta["input_top_logprobs"]]
        assert [value for _, value in scores] == own[1:]
        assert [tokens[:100] for tokens, _ in scores] == tops[1:]
    # the marker's token is the likeliest, so its rank is that of the list
    (position,) = (each["prompt_logprobs"][3] for each in answer["choices"][:1])
    assert position[str(marker.token(0))]["rank"] == 1


def test_prompt_token_beyond_the_likeliest_has_the_next_rank(
    vllm_server: Server, model: str
) -> None:
    body = trl.scoring(model, [5, 6], prompt_logprobs=1)
    (choice,) = ask(vllm_server, "POST", COMPLETIONS, body)["choices"]
    ranks = {token: entry["rank"] for token, entry in choice["prompt_logprobs"][1].items()}
    assert ranks == {"6": 2, str(marker.token(0)): 1}
    assert list(ranks) == ["6", str(marker.token(0))]


def test_prompt_logprobs_are_those_before_the_temperature(vllm_server: Server, model: str) -> None:
    ids = prompt()
    scores = []
    for temperature in (1.0, 0.5):
        body = trl.scoring(model, ids, temperature=temperature)
        (choice,) = ask(vllm_server, "POST", COMPLETIONS, body)["choices"]
        scores.append(trl.read_scores(choice, ids, 1))
    assert scores[0] == scores[1]


def test_prompt_logprobs_widen_no_logprobs_of_the_output(vllm_server: Server, model: str) -> None:
    body = {**trl.generation(model, [prompt()], n=2, **GREEDY), "prompt_logprobs": 0, "logprobs": 1}
    alone = ask(vllm_server, "POST", COMPLETIONS, {**body, "prompt_logprobs": None})["choices"]
    for count in (0, 3):
        both = ask(vllm_server, "POST", COMPLETIONS, {**body, "prompt_logprobs": count})["choices"]
        assert len(both) == 2
        for before, choice in zip(alone, both, strict=True):
            assert choice["logprobs"]["top_logprobs"] == before["logprobs"]["top_logprobs"]
            for position in choice["prompt_logprobs"][1:]:
                assert count <= len(position) <= 1 + count


def test_prompt_logprobs_need_no_logprobs_of_the_output(vllm_server: Server, model: str) -> None:
    (choice,) = ask(vllm_server, "POST", COMPLETIONS, trl.scoring(model, prompt()))["choices"]
    asked_by_others = ("logprobs", "token_ids", "prompt_token_ids")
    assert not any(choice.get(name) for name in asked_by_others)


def test_default_values_of_vllm_fields_are_accepted(vllm_server: Server, model: str) -> None:
    """Some clients send every field."""
    nothing: dict[str, Any] = {
        "prompt_logprobs": None,
        "bad_words": [],
        "structured_outputs": None,
        "use_beam_search": False,
        "add_special_tokens": True,
        "return_tokens_as_token_ids": None,
        "kv_transfer_params": None,
        "request_id": "mine",
    }
    body = {**trl.rollout(model, prompt(), **GREEDY), **nothing}
    tokens, values = trl.read_rollout(ask(vllm_server, "POST", COMPLETIONS, body))
    assert tokens == SAID
    assert not any(map(math.isnan, values))
