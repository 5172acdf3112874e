"""A request that would end a scheduler gets a 400 with a sentence; other requests continue."""

from __future__ import annotations

from typing import Any

import pytest

from harness.marker import VOCAB, token
from harness.server import Server
from tests.support.load import requests_run_on

GENERATE, COMPLETIONS = "/generate", "/v1/completions"
# above the largest 32-bit float, and below the smallest normal one
LARGE, SMALL = 1e39, 1e-38


def generate(*, drawn: bool = False, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Return a ``/generate`` body. ``drawn`` samples tokens at temperature 1."""
    sampling = {"max_new_tokens": 4, "temperature": 1.0 if drawn else 0.0}
    sampling |= fields.pop("sampling", {})
    return GENERATE, {"input_ids": [5, 6], "sampling_params": sampling, **fields}


def complete(prompt: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": "default", "prompt": prompt, "max_tokens": 4, **fields}


def expect_refusal(server: Server, path: str, body: dict[str, Any], *words: str) -> None:
    answer = server.post(path, body)
    assert answer["status_code"] == 400, answer
    said = answer.get("message") or answer["error"]["message"]
    for word in words:
        assert word in said, said


@pytest.mark.guards_fix
@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (generate(input_ids=[5, 6, VOCAB]), ("position 2", f"is {VOCAB}", "vocabulary")),
        (generate(input_ids=[-1]), ("position 0", "is -1")),
        (generate(input_ids=[[5], [6, 1 << 40]]), ("position 1", f"is {1 << 40}")),
        (generate(input_ids=[5, VOCAB], sampling={"n": 2}), ("position 1",)),
        (complete([5, VOCAB]), ("position 1",)),
        (complete([[5], [VOCAB]]), ("position 0",)),
        (
            generate(return_logprob=True, top_logprobs_num=VOCAB + 1),
            ("top_logprobs_num", f"{VOCAB + 1}"),
        ),
        (generate(return_logprob=True, top_logprobs_num=[3]), ("top_logprobs_num", "[3]")),
        (complete([5], logprobs=VOCAB + 1), ("top_logprobs_num",)),
        (generate(return_logprob=True, logprob_start_len=-2), ("logprob_start_len", "-2")),
        (generate(input_ids=None, text=""), ("no tokens",)),
        (generate(positional_embed_overrides={"a": 1}), ("positional_embed_overrides",)),
        (generate(drawn=True, sampling={"top_k": 1 << 31}), ("top_k", f"{1 << 31}")),
        (
            generate(drawn=True, sampling={"repetition_penalty": SMALL}),
            ("repetition_penalty", f"{SMALL}"),
        ),
        (generate(drawn=True, sampling={"logit_bias": {"5": LARGE}}), ("logit_bias of 5",)),
        (
            generate(
                drawn=True,
                sampling={"logit_bias": {str(each): -LARGE for each in range(VOCAB)}},
            ),
            ("logit_bias", "no token"),
        ),
    ],
    ids=[
        "token beyond the vocabulary",
        "token below it",
        "token in a batch",
        "token with n",
        "completions",
        "completions in a batch",
        "logprobs of more than all tokens",
        "logprobs of a list",
        "logprobs of completions",
        "logprobs from before the prompt",
        "empty prompt",
        "embeddings of no kind",
        "top k",
        "repetition penalty",
        "bias for one",
        "bias against all",
    ],
)
def test_request_that_would_end_the_scheduler_is_refused(
    server: Server, request_: tuple[str, dict[str, Any]], words: tuple[str, ...]
) -> None:
    with requests_run_on(server):
        expect_refusal(server, *request_, *words)


def test_request_that_would_stall_the_scheduler_is_refused(server: Server) -> None:
    """These would not end a scheduler by themselves, or not at once."""
    with requests_run_on(server):
        for n in (0, -1, 16385, 10**9):
            expect_refusal(server, *generate(sampling={"n": n}), "n must be", f"{n}")
        for body, word in (
            (generate(return_logprob=True, top_logprobs_num=-5), "top_logprobs_num is -5"),
            (generate(lora_id="mine"), "lora_path"),
            (generate(token_indices_to_pool=[1]), "--disable-radix-cache"),
        ):
            expect_refusal(server, *body, word)


def test_values_at_the_limits_are_accepted(server: Server) -> None:
    bodies = [
        generate(input_ids=[0, VOCAB - 1]),
        generate(return_logprob=True, top_logprobs_num=VOCAB, logprob_start_len=0),
        generate(sampling={"stop_token_ids": [VOCAB - 1], "min_new_tokens": 2}),
        generate(drawn=True, sampling={"top_k": (1 << 31) - 1}),
        generate(drawn=True, sampling={"top_k": -1, "repetition_penalty": 1e-20}),
        generate(drawn=True, sampling={"logit_bias": {"5": 1e30, "6": -LARGE}}),
    ]
    with requests_run_on(server):
        for path, body in bodies:
            answer = server.post(path, body)
            assert answer["status_code"] == 200, (body, answer)
            assert len(answer["output_ids"]) == 4


@pytest.mark.guards_fix
@pytest.mark.parametrize("stop", [VOCAB + 1, -7])
def test_stop_token_outside_the_vocabulary_is_ignored(server: Server, stop: int) -> None:
    """Clients send stop tokens of other models."""
    path, body = generate(sampling={"stop_token_ids": [stop], "min_new_tokens": 2})
    with requests_run_on(server):
        answer = server.post(path, body)
        assert answer["output_ids"] == [token(0)] * 4, answer


@pytest.mark.guards_fix
def test_bad_token_in_a_session_is_refused(server: Server) -> None:
    session = {"capacity_of_str_len": 1000, "session_id": "asked"}
    with requests_run_on(server):
        assert server.post("/open_session", session)["status_code"] == 200
        params: dict[str, Any] = {"session_params": {"id": "asked"}}
        expect_refusal(server, *generate(input_ids=[5, VOCAB], **params), "position 1")
        path, body = generate(**params)
        assert server.post(path, body)["output_ids"] == [token(0)] * 4
        assert server.post("/close_session", {"session_id": "asked"})["status_code"] == 200
