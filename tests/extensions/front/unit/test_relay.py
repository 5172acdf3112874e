"""A client's stream is the same from one server and from several."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_inflight.client.answers import WrongAnswer
from sglang_inflight.extensions.front.relay import CHAT, COMPLETIONS, GENERATE, Relay, Repeated
from sglang_inflight.extensions.front.whole import Whole

WORDS = ["Once", " upon", " a", " time", ",", " there", " was", " a", " model"]
TOKENS = list(range(10, 10 + len(WORDS)))
LOGPROBS = [-float(place) for place in range(len(WORDS))]
PATHS = (COMPLETIONS, CHAT, GENERATE)


def url(server: int) -> str:
    return f"http://s{server}:30000"


def chunk(path: str, server: int, begin: int, since: int, until: int) -> dict[str, Any]:
    """Return a server's chunk of tokens ``since`` to ``until``. Its own begin at ``begin``."""
    text = "".join(WORDS[since:until])
    entries = [{"logprob": value} for value in LOGPROBS[since:until]]
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "length" if until == len(WORDS) else None,
        "output_so_far": {
            "token_ids": TOKENS[since:until],
            "logprobs": LOGPROBS[since:until],
            "weight_versions": [
                *([{"version": "v", "epoch": 0, "server": url(9), "start": 0, "end": begin}]
                  if begin else []),
                {"version": "v", "epoch": 0, "start": begin, "end": until},
            ],
        },
    }  # fmt: skip
    if path == COMPLETIONS:
        choice |= {"text": text, "logprobs": {"token_logprobs": LOGPROBS[since:until]}}
    elif path == CHAT:
        choice |= {"delta": {"content": text}, "logprobs": {"content": entries}}
    else:
        choice |= {"token_ids": TOKENS[since:until], "logprobs": {"content": entries}}
    return {"id": f"id-{server}", "created": server, "choices": [choice]}


def read(path: str, chunks: list[dict[str, Any]]) -> tuple[Any, list[float]]:
    """Return what a client has from its chunks: its text or tokens, and log probabilities."""
    said: Any = [] if path == GENERATE else ""
    logprobs: list[float] = []
    for each in chunks:
        (choice,) = each["choices"]
        if path == GENERATE:
            said = said + choice["token_ids"]
        else:
            said += choice["text"] if path == COMPLETIONS else choice["delta"]["content"] or ""
        found = choice.get("logprobs") or {}
        logprobs += found.get("token_logprobs", [])
        logprobs += [entry["logprob"] for entry in found.get("content", [])]
    return said, logprobs


# neither limit holds on a busy machine
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    path=st.sampled_from(PATHS),
    cuts=st.lists(st.integers(0, len(WORDS) - 1), max_size=3).map(sorted),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
)
def test_stream_of_several_servers_is_that_of_one(
    path: str, cuts: list[int], sizes: list[int]
) -> None:
    # the server's part of it
    from sglang_inflight.extensions.continued.so_far import read_so_far

    relay, left, got = Relay(path, {"n": 1}), itertools.cycle(sizes), []
    for server, end in enumerate([*cuts, len(WORDS)]):
        body = relay.next_body()
        begin = len(relay.tokens)
        if begin:
            custom = (
                body["sampling_params"]["extra_args"] if path == GENERATE else body["custom_params"]
            )
            assert read_so_far(custom["output_so_far"]).token_ids == TOKENS[:begin]
            assert custom["output_so_far"]["logprobs"] == LOGPROBS[:begin]
        since = 0
        while max(since, begin) < end:
            until = min(max(since, begin) + next(left), end)
            if relay.take(chunk(path, server, begin, since, until), url(server)):
                got.append(copy.deepcopy(relay.answer(url(server))))
            since = until
        assert relay.why_not_movable() is None
        if end < len(WORDS):
            relay.move(url(server), "killed")
    said, logprobs = read(path, got)
    assert said == (TOKENS if path == GENERATE else "".join(WORDS))
    assert logprobs == LOGPROBS
    assert len({(each["id"], each["created"]) for each in got}) == 1
    assert relay.finish_reason == "length"
    assert not any("output_so_far" in choice for each in got for choice in each["choices"])


def test_beginnings_of_a_chat_and_of_its_calls_come_once() -> None:
    relay = Relay(CHAT, {})

    def begin(server: int) -> list[Any]:
        return [
            {"role": "assistant", "content": ""},
            {
                "tool_calls": [
                    {"index": 0, "id": f"c{server}", "function": {"name": "f", "arguments": ""}}
                ]
            },
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        ]

    got = []
    for server in range(2):
        relay.next_body()
        deltas = begin(server)
        if server:
            deltas.append({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]})
        for place, delta in enumerate(deltas):
            choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
            if place:
                # the first chunk of the second server has all tokens so far
                since = 0 if place == 1 else place + server - 1
                choice["output_so_far"] = {"token_ids": TOKENS[since : place + server]}
            if relay.take({"choices": [choice]}, url(server)):
                got.append(copy.deepcopy(delta))
        relay.move(url(server), "killed")
    assert [delta.get("role") for delta in got if delta.get("role")] == ["assistant"]
    calls = [call for delta in got for call in delta.get("tool_calls", ())]
    assert [call["id"] for call in calls if call.get("id")] == ["c0"]
    assert "".join(call["function"].get("arguments", "") for call in calls) == '{"a": 1}'


def test_usage_comes_once_after_the_end() -> None:
    relay = Relay(COMPLETIONS, {})
    relay.next_body()
    assert relay.take(chunk(COMPLETIONS, 0, 0, 0, len(WORDS)), url(0))
    assert relay.take({"choices": [], "usage": {"completion_tokens": 9}}, url(0))
    assert relay.answer(url(0))["usage"] == {"completion_tokens": 9}


def test_other_tokens_than_given_are_refused() -> None:
    relay = Relay(COMPLETIONS, {})
    relay.next_body()
    relay.take(chunk(COMPLETIONS, 0, 0, 0, 3), url(0))
    relay.move(url(0), "killed")
    relay.next_body()
    wrong = chunk(COMPLETIONS, 1, 3, 0, 4)
    wrong["choices"][0]["output_so_far"]["token_ids"][1] = 7
    with pytest.raises(WrongAnswer, match="other tokens than it was given"):
        relay.take(wrong, url(1))


@pytest.mark.parametrize("body", [{"n": 2}, {"sampling_params": {"n": 2}}])
def test_stream_of_samples_moves_before_its_first_chunk_alone(body: dict[str, Any]) -> None:
    relay = Relay(COMPLETIONS, body)
    relay.next_body()
    assert relay.why_not_movable() is None
    relay.take(chunk(COMPLETIONS, 0, 0, 0, 3), url(0))
    relay.answer(url(0))
    assert "several samples" in str(relay.why_not_movable())


def test_stream_without_token_ids_does_not_move() -> None:
    relay = Relay(CHAT, {})
    relay.next_body()
    said = chunk(CHAT, 0, 0, 0, 3)
    del said["choices"][0]["output_so_far"]
    relay.take(said, url(0))
    relay.answer(url(0))
    assert "SGLANG_INFLIGHT_VLLM_ROUTES" in str(relay.why_not_movable())


def test_whole_answer_that_was_handed_back_goes_on() -> None:
    whole = Whole(COMPLETIONS, {"prompt": [5, 6], "exact_weight_version": "v"})
    assert whole.prompt == [5, 6]
    whole.next_body()
    ended = chunk(COMPLETIONS, 0, 0, 0, 3)
    ended["choices"][0]["finish_reason"] = "abort"
    assert whole.take(ended, url(0))
    assert whole.finish_reason == "abort"
    assert whole.wanted_versions() == {"v"}
    so_far = whole.next_body()["custom_params"]["output_so_far"]
    assert so_far["token_ids"] == TOKENS[:3]
    assert so_far["weight_versions"][0]["server"] == url(0)
    whole.restart()
    assert "custom_params" not in whole.next_body()


def test_repeated_parts_are_new_once() -> None:
    repeated = Repeated()
    assert [repeated.new("a", part) for part in ("on", "ce")] == ["on", "ce"]
    repeated.begin()
    assert [repeated.new("a", part) for part in ("o", "nce upon", " a")] == ["", " upon", " a"]
    assert repeated.new("b", [1, 2]) == [1, 2]


def test_end_at_a_server_without_a_token_is_not_the_streams() -> None:
    """The next server's stream may break off, and then it must not look complete."""
    for rollout in (Relay(COMPLETIONS, {}), Whole(COMPLETIONS, {})):
        rollout.next_body()
        ended = {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}
        rollout.take(ended, url(0))
        assert rollout.finish_reason == "abort"
        rollout.next_body()
        assert rollout.finish_reason is None
