"""Records of tokens on vLLM's routes: experts, sampling masks, spans of versions and token ids."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from harness import marker
from harness.server import PLAIN, Server, serve
from tests.support import token_experts
from tests.support.load import PATIENCE_S, ask, prompt, until, update
from tests.support.vllm import VLLMClient

pytest_plugins = ["tests.support.fixtures"]

GENERATE, SKYRL = "/inference/v1/generate", "/skyrl/v1/generate"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OPENAI = (COMPLETIONS, CHAT)
FLAGS = ("--enable-return-routed-experts", "--weight-version", "v0")
PROMPT = [4, 5, 6, 7, 8, 9]
TEXT = " ".join(f"t{token}" for token in PROMPT)
TOKENS = 8
# warm enough for each of the likeliest tokens to have a chance
TRUNCATED: dict[str, Any] = {"temperature": 30.0, "top_k": 5, "top_p": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routed")
    for version in range(2):
        token_experts.build(folder / f"v{version}", version)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    env = {"SGLANG_INFLIGHT_VLLM_ROUTES": "1"}
    with serve(folder / "v0", *FLAGS, log=folder / "log", env=env) as server:
        yield server


@pytest.fixture(scope="module")
def set_up_server(folder: Path) -> Iterator[Server]:
    """A server with prime-rl's forms as settings, whose streams send increments."""
    env = {
        "SGLANG_INFLIGHT_VLLM_ROUTES": "1",
        "SGLANG_INFLIGHT_VLLM_SAMPLING_MASKS": "1",
        "SGLANG_INFLIGHT_VLLM_ROUTED_EXPERTS": "array",
    }
    flags = (*FLAGS, "--incremental-streaming-output")
    with serve(folder / "v0", *flags, log=folder / "log of increments", env=env) as server:
        yield server


def body_of(path: str, *, n: int = 1, tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    """Return a greedy request to one of the routes. ``sampling`` overrides its parameters."""
    sampling = {"temperature": 0, "max_tokens": tokens, "n": n, **fields.pop("sampling", {})}
    sampling["ignore_eos"] = True
    if path in (GENERATE, SKYRL):
        return {"token_ids": PROMPT, "sampling_params": sampling, **fields}
    asked: dict[str, Any] = {"prompt": PROMPT}
    if path == CHAT:
        asked = {"messages": [{"role": "user", "content": TEXT}]}
    return {"model": "default", **asked, **sampling, **fields}


class Asked:
    """A request and the thread that reads its answer, whole or streamed."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self._server, self._path, self._body = server, path, body
        self.events: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def ended(self) -> list[dict[str, Any]]:
        """Return the whole answer, or a stream's events."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.events

    def _read(self) -> None:
        url = self._server.url + self._path
        with httpx.stream("POST", url, json=self._body, timeout=PATIENCE_S, **PLAIN) as response:
            if not self._body.get("stream") or response.status_code != 200:
                self.events.append(json.loads(response.read()))
                return
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if line.startswith("data: ") and data != "[DONE]":
                    self.events.append(json.loads(data))


def choices_of(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of an answer; a stream's are put together."""
    return joined(Asked(server, path, body).ended())


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the choices of chunks together: lists of tokens grow, other fields are replaced."""
    whole: dict[int, dict[str, Any]] = {}
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            so_far = whole.setdefault(choice["index"], {})
            for name, value in choice.items():
                if name in ("token_ids", "sampling_mask") and value is not None:
                    so_far[name] = so_far.get(name, []) + value
                elif value is not None or name not in so_far:
                    so_far[name] = value
    return [whole[index] for index in sorted(whole)]


def as_sglang_says(server: Server, **fields: Any) -> dict[str, Any]:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
        "return_routed_experts": True,
        **fields,
    }
    answer: dict[str, Any] = ask(server, "POST", "/generate", body)
    return answer


# ---- experts ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_experts_equal_those_of_sglangs_own_route(server: Server, n: int, stream: bool) -> None:
    answer = as_sglang_says(server)
    expected = token_experts.of_sglang(answer["meta_info"])
    assert len(expected) == len(PROMPT) + TOKENS - 1
    assert len(np.unique(expected, axis=0)) > 3
    choices = choices_of(server, GENERATE, body_of(GENERATE, n=n, stream=stream))
    assert len(choices) == n
    for choice in choices:
        assert choice["token_ids"] == answer["output_ids"]
        np.testing.assert_array_equal(token_experts.of_vllm(choice["routed_experts"]), expected)


@pytest.mark.parametrize("path", OPENAI)
def test_openai_choices_have_experts(server: Server, path: str) -> None:
    expected = token_experts.of_sglang(as_sglang_says(server)["meta_info"])
    choices = choices_of(server, path, body_of(path, n=2))
    assert len(choices) == 2
    for choice in choices:
        np.testing.assert_array_equal(token_experts.of_vllm(choice["routed_experts"]), expected)
    for off in ({"return_routed_experts": False}, {"stream": True}):
        (choice,) = choices_of(server, path, body_of(path, **off))
        assert choice.get("routed_experts") is None


def test_several_prompts_have_experts_of_their_own(server: Server) -> None:
    prompts = [PROMPT, PROMPT[:3]]
    choices = choices_of(server, COMPLETIONS, body_of(COMPLETIONS, n=2) | {"prompt": prompts})
    rows = [len(token_experts.of_vllm(choice["routed_experts"])) for choice in choices]
    assert rows == [len(each) + TOKENS - 1 for each in prompts for _ in range(2)]


@pytest.mark.parametrize("start", [0, 4, len(PROMPT)])
@pytest.mark.parametrize("path", [GENERATE, *OPENAI])
def test_prompt_start_leaves_out_experts_of_earlier_tokens(
    server: Server, path: str, start: int
) -> None:
    expected = token_experts.of_sglang(as_sglang_says(server)["meta_info"])[start:]
    said: dict[str, Any] = {"routed_experts_prompt_start": start}
    body = body_of(path, sampling=said) if path == GENERATE else body_of(path, **said)
    (choice,) = choices_of(server, path, body)
    np.testing.assert_array_equal(token_experts.of_vllm(choice["routed_experts"]), expected)


def test_request_aborted_before_its_first_token_has_no_experts(server: Server) -> None:
    ask(server, "POST", "/pause_generation", {"mode": "in_place"})
    asked = Asked(server, GENERATE, body_of(GENERATE, request_id="early"))
    until("it waits", lambda: ask(server, "GET", "/inflight/status")["waiting"] == 1)
    ask(server, "POST", "/abort_request", {"rid": "early"})
    ask(server, "POST", "/continue_generation", {})
    (choice,) = joined(asked.ended())
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])
    assert choice["routed_experts"] is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_skyrl_reads_experts_as_an_array(server: Server, stream: bool) -> None:
    expected = token_experts.of_sglang(as_sglang_says(server)["meta_info"])
    (choice,) = choices_of(server, SKYRL, body_of(SKYRL, stream=stream))
    assert choice["routed_experts"]["dtype"] == "uint8"
    np.testing.assert_array_equal(token_experts.of_array(choice["routed_experts"]), expected)
    assert choice["rollout_sample_support"] is None


@pytest.mark.parametrize("start", [0, 4])
def test_prime_rl_reads_experts_as_an_array_with_its_start(
    set_up_server: Server, start: int
) -> None:
    expected = token_experts.of_sglang(as_sglang_says(set_up_server)["meta_info"])[start:]
    sampling = {"routed_experts_prompt_start": start}
    raw = httpx.post(
        set_up_server.url + GENERATE, json=body_of(GENERATE, sampling=sampling), timeout=60, **PLAIN
    ).content
    # prime-rl's client cuts the data out of the bytes
    assert b'"routed_experts":{"data":"' in raw
    said = json.loads(raw)["choices"][0]["routed_experts"]
    assert said["start"] == start
    np.testing.assert_array_equal(token_experts.of_array(said), expected)


# ---- sampling masks --------------------------------------------------------------------


def expect_masks(tokens: list[int], masks: list[list[int]]) -> None:
    assert len(masks) == len(tokens) == TOKENS
    for token, mask in zip(tokens, masks, strict=True):
        assert token in mask
        assert len(set(mask)) == len(mask) <= TRUNCATED["top_k"]
    assert max(map(len, masks)) > 1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_samples_of_one_prompt_have_masks(server: Server, n: int, stream: bool) -> None:
    body = body_of(GENERATE, n=n, sampling=TRUNCATED, stream=stream, return_sampling_mask=True)
    choices = choices_of(server, GENERATE, body)
    assert len(choices) == n
    for choice in choices:
        expect_masks(choice["token_ids"], choice["sampling_mask"])


def test_request_of_no_tokens_has_no_mask(server: Server) -> None:
    """SGLang computes the prompt of several samples by such a request."""
    sampling = {"temperature": 0, "max_new_tokens": 0}
    answer = as_sglang_says(server, sampling_params=sampling, return_sampling_mask=True)
    assert answer["output_ids"] == answer["meta_info"]["output_token_sampling_mask"] == []


def test_masks_equal_those_of_sglangs_own_route(server: Server) -> None:
    answer = as_sglang_says(server, return_sampling_mask=True)
    expected = answer["meta_info"]["output_token_sampling_mask"]
    (choice,) = choices_of(server, GENERATE, body_of(GENERATE, return_sampling_mask=True))
    assert choice["token_ids"] == answer["output_ids"]
    assert choice["sampling_mask"] == expected == [[token] for token in answer["output_ids"]]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_with_a_mask_are_over_the_mask(server: Server, count: int, stream: bool) -> None:
    sampling = {**TRUNCATED, "logprobs": count}
    body = body_of(GENERATE, sampling=sampling, stream=stream, return_sampling_mask=True)
    for event in Asked(server, GENERATE, body).ended():
        (choice,) = event["choices"]
        content = choice["logprobs"]["content"]
        for token, mask, entry in zip(
            choice["token_ids"], choice["sampling_mask"], content, strict=True
        ):
            tops = {top["token_id"]: top["logprob"] for top in entry["top_logprobs"]}
            assert entry["token_id"] == token
            assert next(iter(tops)) == token
            assert tops[token] == entry["logprob"]
            assert len(tops) == max(1, min(count, len(mask)))
            # at this temperature, a token of the whole vocabulary has less
            assert math.exp(entry["logprob"]) > 0.05
            if count >= len(mask):
                assert set(tops) == set(mask)
                assert math.isclose(sum(map(math.exp, tops.values())), 1, abs_tol=1e-3)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_setting_returns_masks_unless_a_request_declines(
    set_up_server: Server, stream: bool
) -> None:
    body = body_of(GENERATE, sampling=TRUNCATED, stream=stream)
    (choice,) = choices_of(set_up_server, GENERATE, body)
    expect_masks(choice["token_ids"], choice["sampling_mask"])
    declined = body_of(GENERATE, stream=stream, return_sampling_mask=False)
    (choice,) = choices_of(set_up_server, GENERATE, declined)
    assert choice["sampling_mask"] is None


def test_skyrl_reads_masks_as_an_array(server: Server) -> None:
    body = body_of(SKYRL, sampling=TRUNCATED, return_sample_support=True)
    (choice,) = choices_of(server, SKYRL, body)
    support = choice["rollout_sample_support"]
    assert support["dtype"] == "int32"
    rows = token_experts.of_array(support)
    assert rows.shape == (TOKENS, TRUNCATED["top_k"])
    masks = [[int(token) for token in row if token != -1] for row in rows]
    assert [[*mask, *[-1] * (rows.shape[1] - len(mask))] for mask in masks] == rows.tolist()
    expect_masks(choice["token_ids"], masks)


# ---- spans of versions -----------------------------------------------------------------


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [GENERATE, *OPENAI])
def test_records_name_both_versions_of_an_update_in_flight(
    server: Server, folder: Path, path: str, stream: bool, kv_cache: str
) -> None:
    update(server, folder, 0)
    body = body_of(path, n=2, tokens=10_000, stream=stream)
    if path == GENERATE:
        body |= {"return_sampling_mask": True}
        body["sampling_params"]["logprobs"] = 1
    else:
        body |= {"return_weight_versions": True, "return_token_ids": True}
    asked = Asked(server, path, body)

    def made(count: int) -> bool:
        return bool(ask(server, "GET", "/inflight/status")["running"] == count)

    until("both samples run", lambda: made(2))
    update(server, folder, 1, non_blocking=True, kv_cache=kv_cache)
    # the next call is answered after another step
    for _ in range(5):
        ask(server, "GET", "/inflight/status")
    ask(server, "POST", "/abort_request", {"abort_all": True})
    events = asked.ended()
    choices = joined(events)
    assert len(choices) == 2
    for choice in choices:
        assert choice["finish_reason"] == "abort"
        tokens, spans = choice["token_ids"], choice["weight_versions"]
        assert spans[-1]["version"] == "v1"
        assert spans[-1]["end"] == len(tokens)
        for span in spans:
            version = int(span["version"].removeprefix("v"))
            assert set(tokens[span["start"] : span["end"]]) == {marker.token(version)}
        if path == GENERATE:
            assert choice["sampling_mask"] == [[token] for token in tokens]
        if path == GENERATE or not stream:
            experts = token_experts.of_vllm(choice["routed_experts"])
            assert len(experts) == len(PROMPT) + len(tokens) - 1
        (kv,) = {span["end"] for span in choice["kv_versions"][-1:]}
        assert kv in (len(PROMPT) + len(tokens) - 1, len(PROMPT) + len(tokens))
    if stream and path != GENERATE:
        ends = [c["finish_reason"] for e in events for c in e["choices"] if "weight_versions" in c]
        assert ends == ["abort", "abort"]
    update(server, folder, 0)


@pytest.mark.parametrize("path", OPENAI)
def test_openai_choices_have_spans_only_when_asked(server: Server, path: str) -> None:
    (choice,) = choices_of(server, path, body_of(path))
    assert "weight_versions" not in choice
    assert "kv_versions" not in choice


# ---- token ids -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("increments", [False, True], ids=["repeats", "increments"])
@pytest.mark.parametrize("path", OPENAI)
def test_stream_has_token_ids(
    request: pytest.FixtureRequest, path: str, increments: bool, n: int
) -> None:
    server: Server = request.getfixturevalue("set_up_server" if increments else "server")
    body = body_of(path, n=n, return_token_ids=True, logprobs=True)
    whole = choices_of(server, path, body)
    events = Asked(server, path, {**body, "stream": True}).ended()
    streamed = joined(events)
    assert [c["token_ids"] for c in streamed] == [c["token_ids"] for c in whole]
    assert [len(c["token_ids"]) for c in streamed] == [TOKENS] * n
    for event in events:
        for choice in event["choices"]:
            logprobs = choice.get("logprobs") or {}
            said = logprobs.get("content", logprobs.get("tokens", ()))
            assert len(said) == len(choice.get("token_ids", ()))
    # a chat's are beside the choices, in the first chunk of each
    where = [e if path == CHAT else e["choices"][0] for e in events]
    prompts = [each["prompt_token_ids"] for each in where if each.get("prompt_token_ids")]
    assert prompts == [PROMPT] * n


def test_generate_stream_begins_with_the_prompt(server: Server) -> None:
    body = body_of(GENERATE, stream=True, return_token_ids=True)
    first, *others = Asked(server, GENERATE, body).ended()
    assert first["prompt_token_ids"] == PROMPT
    assert all("prompt_token_ids" not in event for event in others)


# ---- bad input -------------------------------------------------------------------------


@pytest.mark.parametrize("path", [GENERATE, SKYRL, *OPENAI])
def test_experts_of_a_server_that_records_none_are_refused(
    vllm_server: Server, vllm: VLLMClient, path: str
) -> None:
    body = body_of(path)
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "t5"}]
    refused = vllm_server.post(path, {**body, "return_routed_experts": True})
    assert refused["status_code"] == 400, refused
    assert "--enable-return-routed-experts" in refused["error"]["message"]
    # prime-rl sends this to every server
    start = {"routed_experts_prompt_start": 1}
    if path in (GENERATE, SKYRL):
        body["sampling_params"] |= start
    (choice,) = vllm.post(path, body if path in (GENERATE, SKYRL) else {**body, **start})["choices"]
    assert choice.get("routed_experts") is None


@pytest.mark.parametrize(
    ("path", "word", "fields"),
    [
        (GENERATE, "prompt has 16 tokens", {"sampling": {"routed_experts_prompt_start": 17}}),
        (
            GENERATE,
            "routed_experts_prompt_start",
            {"sampling": {"routed_experts_prompt_start": -1}},
        ),
        (GENERATE, "`$.return_routed_experts`", {"return_routed_experts": "yes"}),
        (GENERATE, "`$.return_sampling_mask`", {"return_sampling_mask": 1}),
        (GENERATE, "top_k", {"return_sampling_mask": True, "sampling": {"temperature": 1.0}}),
        (SKYRL, "top_k", {"return_sample_support": True, "sampling": {"temperature": 1.0}}),
        (COMPLETIONS, "/inference/v1/generate", {"return_sampling_mask": True}),
        (COMPLETIONS, "routed_experts_prompt_start", {"routed_experts_prompt_start": -1}),
        (CHAT, "routed_experts_prompt_start", {"routed_experts_prompt_start": "x"}),
        (CHAT, "true or false", {"return_weight_versions": "yes"}),
    ],
)
def test_bad_field_is_refused(
    vllm_server: Server, path: str, word: str, fields: dict[str, Any]
) -> None:
    body = body_of(path, **fields)
    if path in (GENERATE, SKYRL):
        body["token_ids"] = prompt(16)
    refused = vllm_server.post(path, body)
    assert refused["status_code"] == 400, refused
    assert word in refused["error"]["message"]


@pytest.mark.parametrize("field", ["return_full_logprobs", "return_sample_support_logprobs"])
def test_other_arrays_of_skyrl_are_refused(vllm_server: Server, field: str) -> None:
    refused = vllm_server.post(SKYRL, body_of(SKYRL, **{field: True}))
    assert refused["status_code"] == 501, refused
    assert field in refused["error"]["message"]


@pytest.mark.parametrize("path", OPENAI)
def test_prompt_start_beyond_the_prompt_is_refused(server: Server, path: str) -> None:
    body = body_of(path, routed_experts_prompt_start=len(PROMPT) + 1)
    refused = server.post(path, body)
    assert refused["status_code"] == 400, refused
    assert "routed_experts_start_len" in refused["message"]
