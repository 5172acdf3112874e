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
from tests.support.vllm import VLLMClient

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
        (COMPLETIONS, "prompt_logprobs", {"prompt_logprobs": 0}),
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


def test_teacher_scoring_is_refused_with_the_route_to_use(
    vllm_server: Server, vllm: VLLMClient, model: str
) -> None:
    refused = vllm_server.post(COMPLETIONS, trl.scoring(model, prompt()))
    assert refused["status_code"] == 400, refused
    assert "/inference/v1/generate" in refused["error"]["message"]
    body = {
        "model": model,
        "token_ids": prompt(),
        "sampling_params": {"max_tokens": 1, "prompt_logprobs": 2},
    }
    assert len(vllm.post("/inference/v1/generate", body)["prompt_logprobs"]) == len(prompt())


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
