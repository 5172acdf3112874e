"""vLLM's ``/inference/v1/generate``: its requests and its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import marker
from harness.server import PLAIN, Server, for_the_answer
from tests.support.load import (
    ENDLESS,
    expect_spans,
    expect_spans_in_chunks,
    prompt,
    status,
    until,
    until_waiting,
    update,
)
from tests.support.pool import FLAVOURS, ServerPool
from tests.support.vllm import Rollout, expect_versions_of, make_rollouts

pytest_plugins = ["tests.support.fixtures"]

TOKEN = marker.token(0)

# attention over the marker's whole context takes half a minute
CONTEXT = 512
FLAVOURS["short_context"] = replace(
    FLAVOURS["vllm_server"],
    flags=(*FLAVOURS["vllm_server"].flags, "--context-length", str(CONTEXT)),
)


@pytest.fixture
def short_context(pool: ServerPool) -> Iterator[Server]:
    yield pool.get(FLAVOURS["short_context"])
    pool.restore()


def generate(server: Server, *, code: int = 200, **body: Any) -> Any:
    greedy = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    sampling = {**greedy, **body.pop("sampling_params", {})}
    body = {"token_ids": prompt(), **body, "sampling_params": sampling}
    response = httpx.post(server.url + "/inference/v1/generate", json=body, timeout=60, **PLAIN)
    assert response.status_code == code, response.text
    return response.json()


def refuse(server: Server, *words: str, code: int = 400, **body: Any) -> None:
    error = generate(server, code=code, **body)["error"]
    assert error["code"] == code
    for word in words:
        assert word in error["message"], error


def test_answer_has_tokens_spans_and_usage(vllm_server: Server) -> None:
    answer = generate(vllm_server, token_ids=prompt(16), request_id="mine", return_token_ids=True)
    assert answer["request_id"] == "mine"
    assert len(answer["prompt_token_ids"]) == 16
    (choice,) = answer["choices"]
    (span,) = choice["weight_versions"]
    assert (span["version"], span["start"], span["end"]) == ("v0", 0, 4)
    (kv_span,) = choice["kv_versions"]
    assert (kv_span["version"], kv_span["start"]) == ("v0", 0)
    assert choice == {
        "index": 0,
        "token_ids": [TOKEN] * 4,
        "logprobs": None,
        "finish_reason": "length",
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [span],
        "kv_versions": [kv_span],
    }
    assert answer["usage"] == {
        "prompt_tokens": 16,
        "completion_tokens": 4,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_skyrl_sampling_fields_are_accepted(vllm_server: Server) -> None:
    sampling = {
        "min_tokens": 1,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "logprobs": 1,
        "stop": None,
        "output_kind": 2,
    }
    model = generate(vllm_server)["model"]
    answer = generate(vllm_server, model=model, cache_salt="3", sampling_params=sampling)
    (choice,) = answer["choices"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert len(logprobs) == len(choice["token_ids"]) == 8
    assert all(-1 < logprob <= 0 for logprob in logprobs)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_logprobs_have_the_asked_number_of_tops(vllm_server: Server, count: int) -> None:
    (choice,) = generate(vllm_server, sampling_params={"logprobs": count})["choices"]
    for entry in choice["logprobs"]["content"]:
        assert entry["token"] == f"token_id:{TOKEN}"
        tops = entry["top_logprobs"]
        assert len(tops) == max(count, 1)
        assert tops[0] == {key: entry[key] for key in ("token", "token_id", "logprob")}
        assert len({top["token_id"] for top in tops}) == len(tops)
        values = [top["logprob"] for top in tops]
        assert values == sorted(values, reverse=True)


def test_traced_tokens_are_emitted_and_scored(vllm_server: Server) -> None:
    trace = prompt(6)
    sampling = {"trace_decode_token_ids": trace, "max_tokens": 2, "logprobs": 1}
    (choice,) = generate(vllm_server, sampling_params=sampling)["choices"]
    assert choice["token_ids"] == trace
    assert choice["finish_reason"] == "length"
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == trace


def test_trace_ends_with_the_context(short_context: Server) -> None:
    long, trace = prompt(CONTEXT - 8), prompt(20)
    sampling = {"trace_decode_token_ids": trace}
    (choice,) = generate(short_context, token_ids=long, sampling_params=sampling)["choices"]
    assert 0 < len(choice["token_ids"]) <= 8
    assert choice["token_ids"] == trace[: len(choice["token_ids"])]


@pytest.mark.parametrize("count", [0, 2])
def test_prompt_logprobs_list_the_token_first(vllm_server: Server, count: int) -> None:
    """prime-rl reads the first entry of each position, SkyRL looks the token up."""
    ids = [*prompt(11), marker.VOCAB - 1]
    for _ in range(2):  # the second time from the cache
        sampling = {"max_tokens": 1, "prompt_logprobs": count}
        scored = generate(vllm_server, token_ids=ids, sampling_params=sampling)["prompt_logprobs"]
        assert scored[0] is None
        for token, entry in zip(ids[1:], scored[1:], strict=True):
            assert next(iter(entry)) == str(token)
            assert entry[str(token)]["logprob"] < 0
            assert count <= len(entry) <= 1 + count


def test_logprobs_of_the_output_widen_none_of_the_prompt(vllm_server: Server) -> None:
    sampling = {"max_tokens": 1, "prompt_logprobs": 1, "logprobs": 5}
    scored = generate(vllm_server, token_ids=[5, 6], sampling_params=sampling)["prompt_logprobs"]
    assert {token: entry["rank"] for token, entry in scored[1].items()} == {"6": 2, str(TOKEN): 1}


def test_stop_tokens_and_strings_end_the_answer(vllm_server: Server) -> None:
    for stop in ({"stop_token_ids": [TOKEN]}, {"stop": [f"t{TOKEN}"]}):
        sampling = {**stop, "ignore_eos": False}
        (choice,) = generate(vllm_server, sampling_params=sampling)["choices"]
        assert (choice["finish_reason"], choice["token_ids"]) == ("stop", [TOKEN])


def test_n_outputs_share_one_answer(vllm_server: Server) -> None:
    answer = generate(vllm_server, sampling_params={"n": 3, "logprobs": 0})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert all(choice["token_ids"] == [TOKEN] * 4 for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("n", [1, 2])
def test_stream_has_tokens_and_spans(vllm_server: Server, n: int) -> None:
    rollout = Rollout(vllm_server, tokens=40, n=n, stream_options={"include_usage": True})
    for output in rollout.outputs():
        assert output.finish_reason == "length"
        assert output.tokens == [TOKEN] * 40
        expect_spans(output)
        expect_spans_in_chunks(output)
    (last,) = rollout.others
    assert last["usage"]["completion_tokens"] == 40 * n


def test_cache_salt_separates_prefixes(vllm_server: Server) -> None:
    ids = prompt(64)

    def cached(**body: Any) -> int:
        usage = generate(vllm_server, token_ids=ids, **body)["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached(cache_salt="1") == 0
    assert cached(cache_salt="1") > 0
    assert cached(cache_salt="2") == 0
    assert cached() == 0


def test_spans_are_exact_across_an_update_in_flight(vllm_server: Server, checkpoints: Path) -> None:
    rollouts = make_rollouts(vllm_server, 3)
    update(vllm_server, checkpoints, 1, non_blocking=True, kv_cache="recompute")
    expect_versions_of(rollouts, [0, 1])


def test_aborting_pause_keeps_tokens_and_says_abort(vllm_server: Server) -> None:
    rollouts = make_rollouts(vllm_server, 2)
    assert vllm_server.post("/pause?mode=abort")["status_code"] == 200
    for rollout in rollouts:
        output = rollout.output()
        assert output.finish_reason == "abort"
        expect_spans(output)


def test_abort_before_the_first_token_answers_empty(vllm_server: Server) -> None:
    assert vllm_server.post("/pause?mode=keep")["status_code"] == 200
    rollout = Rollout(vllm_server, tokens=3, stream_options={"include_usage": True})
    until_waiting(vllm_server, 1)
    rollout.abort()
    output = rollout.output()
    assert (output.finish_reason, output.tokens) == ("abort", [])
    (last,) = rollout.others
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (16, 0)


def test_client_disconnect_aborts_its_request(vllm_server: Server) -> None:
    body = {
        "token_ids": prompt(),
        "sampling_params": {"max_tokens": ENDLESS, "ignore_eos": True, "temperature": 0},
    }
    url = vllm_server.url + "/inference/v1/generate"
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", url, json={**body, "stream": True}) as response,
    ):
        first = next(response.iter_lines())
        assert json.loads(first.removeprefix("data: "))["choices"]
    until("it is aborted", lambda: status(vllm_server)["running"] == 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=for_the_answer(1))
    until("it is aborted", lambda: status(vllm_server)["running"] == 0)


def test_max_version_lag_is_read_from_extra_args(vllm_server: Server) -> None:
    refuse(vllm_server, "max_version_lag", sampling_params={"extra_args": {"max_version_lag": -1}})
    assert generate(vllm_server, sampling_params={"extra_args": {"max_version_lag": 1}})


@pytest.mark.parametrize(
    ("code", "words", "body"),
    [
        (400, ("token_ids",), {"token_ids": []}),
        (400, ("token_ids",), {"token_ids": [-1]}),
        (400, ("token_ids",), {"token_ids": "hello"}),
        (400, ("1000000", "vocabulary"), {"token_ids": [7, 10**6]}),
        (400, ("vocabulary",), {"token_ids": [marker.VOCAB]}),
        (400, ("context length",), {"token_ids": [7] * 20_000}),
        (400, ("cache_salt",), {"cache_salt": ""}),
        (400, ("temperature",), {"sampling_params": {"temperature": "hot"}}),
        (400, ("temperature",), {"sampling_params": {"temperature": -1}}),
        (400, ("`$.sampling_params.n`",), {"sampling_params": {"n": 0}}),
        (400, ("stream",), {"stream": True, "sampling_params": {"prompt_logprobs": 0}}),
        (404, ("'another'", "does not exist"), {"model": "another"}),
        (501, ("features",), {"features": {"mm_hashes": {}}}),
        (501, ("kv_transfer_params",), {"kv_transfer_params": {"a": 1}}),
        (501, ("priority",), {"priority": 1}),
        (501, ("output_mode",), {"output_mode": "text"}),
        (501, ("stop_token_ids",), {"sampling_params": {"stop_token_ids": [5]}}),
        (501, ("bad_words",), {"sampling_params": {"bad_words": ["no"]}}),
    ],
)
def test_bad_body_is_refused(
    vllm_server: Server, code: int, words: tuple[str, ...], body: dict[str, Any]
) -> None:
    refuse(vllm_server, *words, code=code, **body)
    assert status(vllm_server)["running"] == 0


def test_refused_stream_sends_an_error_event(vllm_server: Server) -> None:
    rollout = Rollout(vllm_server, tokens=3, token_ids=[7] * 20_000)
    until("it has ended", lambda: rollout.has_ended)
    (event,) = rollout.others
    assert event["error"]["code"] == 400
    assert "context length" in event["error"]["message"]
