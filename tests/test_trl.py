"""TRL's requests to the OpenAI routes, as it sends them."""

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
# the marker's tokens have hardly any chance beside the one of its version
GREEDY: dict[str, Any] = {"temperature": 0.01, "max_tokens": TOKENS, "ignore_eos": True}
SAID = [marker.token(0)] * TOKENS


@pytest.fixture
def model(vllm_server: Server) -> str:
    """As it asks for it when it starts."""
    name: str = ask(vllm_server, "GET", "/v1/models")["data"][0]["id"]
    return name


def test_a_generation(vllm_server: Server, model: str) -> None:
    """Two completions for each of two prompts, whose answers come prompt by prompt."""
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
def test_the_most_likely_tokens(vllm_server: Server, model: str, count: int) -> None:
    """The token itself is among them, whatever its rank is."""
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


def test_a_chat(vllm_server: Server, model: str) -> None:
    answer = ask(vllm_server, "POST", CHAT, trl.chat(model, "t5 t6", n=2, **GREEDY))
    assert answer["prompt_token_ids"] == [5, 6]
    assert [choice["token_ids"] for choice in answer["choices"]] == [SAID] * 2
    for choice in answer["choices"]:
        _, ids = trl.read_logprobs(choice["logprobs"])
        assert ids == [[token] for token in SAID]


def test_a_rollout(vllm_server: Server, model: str) -> None:
    body = trl.rollout(model, prompt(), **GREEDY)
    tokens, logprobs = trl.read_rollout(ask(vllm_server, "POST", COMPLETIONS, body))
    assert tokens == SAID
    assert len(logprobs) == TOKENS
    assert all(-1 < value <= 0 for value in logprobs)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_pattern(vllm_server: Server, model: str, path: str) -> None:
    make = trl.generation if path == COMPLETIONS else trl.chat
    asked: Any = [prompt()] if path == COMPLETIONS else "t5"
    body = make(model, asked, max_tokens=2, structured_outputs={"regex": "t7 ?t9"})
    (choice,) = ask(vllm_server, "POST", path, body)["choices"]
    assert choice["token_ids"] == [7, 9]


def test_names_of_tokens_in_a_stream(vllm_server: Server, model: str) -> None:
    body = trl.generation(model, [prompt()], **GREEDY, stream=True)
    with httpx.stream("POST", vllm_server.url + COMPLETIONS, json=body, timeout=60, **PLAIN) as got:
        lines = [line.removeprefix("data: ") for line in got.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    logprobs = [json.loads(line)["choices"][0]["logprobs"] for line in lines]
    names = [name for each in logprobs if each for name in each["tokens"]]
    assert names == [f"token_id:{token}" for token in SAID]


def test_who_asks_for_no_ids_gets_texts(vllm_server: Server, model: str) -> None:
    """Beside one who does, and after."""
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
def test_a_field_that_would_be_passed_over(
    vllm_server: Server, model: str, path: str, word: str, fields: dict[str, Any]
) -> None:
    body = trl.rollout(model, prompt()) if path == COMPLETIONS else trl.chat(model, "t5")
    refused = vllm_server.post(path, {**body, **fields})
    assert refused["status_code"] == 400, refused
    assert word in refused["error"]["message"]
    assert vllm_server.post(path, body)["status_code"] == 200


def test_a_teacher_is_refused_by_name(vllm_server: Server, vllm: VLLMClient, model: str) -> None:
    refused = vllm_server.post(COMPLETIONS, trl.scoring(model, prompt()))
    assert refused["status_code"] == 400, refused
    assert "/inference/v1/generate" in refused["error"]["message"]
    body = {
        "model": model,
        "token_ids": prompt(),
        "sampling_params": {"max_tokens": 1, "prompt_logprobs": 2},
    }
    assert len(vllm.post("/inference/v1/generate", body)["prompt_logprobs"]) == len(prompt())


def test_fields_that_ask_for_nothing(vllm_server: Server, model: str) -> None:
    """As clients send them that fill in every default of vLLM's."""
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
