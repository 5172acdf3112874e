"""A rollout's output, joined from the streams of several servers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_inflight.client.answers import WrongAnswer
from sglang_inflight.client.rollouts.output import Output, versions_of_contract
from sglang_inflight.client.rollouts.rollouts import split
from sglang_inflight.client.rollouts.servers import Servers
from sglang_inflight.extensions.continued.so_far import read_so_far

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
LOGPROBS = [-float(place) for place in range(len(TOKENS))]
ENTRIES = [[value, token, None] for value, token in zip(LOGPROBS, TOKENS, strict=True)]
TEXT = "".join(map(str, TOKENS))
BODY: dict[str, Any] = {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": len(TOKENS)}}


def url(server: int) -> str:
    return f"http://s{server}:30000"


def chunk(
    server: int, begin: int, sent: int, count: int, is_incremental: bool, before: list[Any]
) -> dict[str, Any]:
    """Return a chunk after ``count`` tokens, of which the caller has ``sent`` from this server.

    The server's own tokens begin at ``begin``. ``before`` has the spans of those it was given.
    """
    since = sent if is_incremental else 0
    own = {"version": f"v{server}", "epoch": server, "start": begin, "end": count}
    is_end = count == len(TOKENS)
    return {
        "output_ids": TOKENS[since:count],
        "text": TEXT[since:count],
        "meta_info": {
            "completion_tokens": count,
            "output_token_logprobs": ENTRIES[since:count],
            "weight_versions": [*before, own],
            "finish_reason": {"type": "length"} if is_end else None,
        },
    }


# neither limit holds on a busy machine
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cuts=st.lists(st.integers(0, len(TOKENS) - 1), max_size=4).map(sorted),
    sizes=st.lists(st.integers(1, 4), min_size=len(TOKENS), max_size=len(TOKENS)),
    forms=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_output_of_several_servers_is_that_of_one(
    cuts: list[int], sizes: list[int], forms: list[bool]
) -> None:
    """Each server makes the tokens up to a cut, in chunks of any size, in either form."""
    output, left = Output(BODY), iter([*sizes, *[1] * len(TOKENS)])
    ends = [*cuts, len(TOKENS)]
    for server, end in enumerate(ends):
        begin = len(output.tokens)
        request = output.next_body()["sampling_params"]
        before: list[Any] = []
        if begin:
            so_far = read_so_far(request["custom_params"]["output_so_far"])
            assert so_far.token_ids == TOKENS[:begin]
            assert so_far.logprobs == LOGPROBS[:begin]
            before = request["custom_params"]["output_so_far"]["weight_versions"]
        sent = 0
        while (at := max(sent, begin)) < end:
            count = min(at + next(left), end)
            assert output.take(
                chunk(server, begin, sent, count, forms[server], before), url(server)
            )
            sent = count
        if end < len(TOKENS) and output.tokens:
            output.move(url(server), "killed")
    answer = output.answer(url(len(cuts)))
    assert answer["output_ids"] == TOKENS
    assert answer["text"] == TEXT
    meta = answer["meta_info"]
    assert meta["output_token_logprobs"] == ENTRIES
    made_by = [
        (span["server"], place)
        for span in meta["weight_versions"]
        for place in range(span["start"], span["end"])
    ]
    expected = [
        next(s for s, end in enumerate(ends) if place < end) for place in range(len(TOKENS))
    ]
    assert made_by == [(url(server), place) for place, server in enumerate(expected)]
    where = [
        (each["server"], place)
        for each in meta["servers"]
        for place in range(each["start"], each["end"])
    ]
    assert where == made_by


def test_abort_that_repeats_the_last_token_adds_none() -> None:
    output = Output(BODY)
    assert output.take(chunk(0, 0, 0, 3, True, []), url(0))
    ended = chunk(0, 0, 2, 3, True, [])
    ended["meta_info"]["finish_reason"] = {"type": "abort"}
    assert output.take(ended, url(0))
    assert output.tokens == TOKENS[:3]
    assert output.text == TEXT[:3]


def test_tokens_that_came_after_meta_info_wait_for_the_next_chunk() -> None:
    output = Output(BODY)
    early = chunk(0, 0, 0, 3, False, [])
    early["output_ids"] = TOKENS[:5]
    assert output.take(early, url(0))
    assert output.tokens == TOKENS[:3]


@pytest.mark.parametrize(
    "broken",
    [
        {"error": "no chunk"},
        {"meta_info": {"completion_tokens": 4}, "output_ids": [1, 2, 3, 4]},
        {"meta_info": {"completion_tokens": 6}, "output_ids": [1, 2]},
    ],
)
def test_chunk_that_does_not_go_on_is_refused(broken: dict[str, Any]) -> None:
    output = Output(BODY)
    output.take(chunk(0, 0, 0, 3, False, []), url(0))
    with pytest.raises(WrongAnswer):
        output.take(broken, url(0))


@pytest.mark.parametrize(
    "fields",
    [
        {"return_sampling_mask": True},
        {"return_hidden_states": True},
        {"session_params": {"id": "a"}},
        {"sampling_params": {"custom_params": {"record": "replay"}}},
        {"sampling_params": {"beam_width": 2}},
    ],
)
def test_output_with_records_of_one_server_does_not_move(fields: dict[str, Any]) -> None:
    output = Output({**BODY, **fields})
    assert output.why_not_movable() is None
    output.take(chunk(0, 0, 0, 3, False, []), url(0))
    assert output.why_not_movable() is not None
    output.restart()
    request = output.next_body()
    assert {name: request[name] for name in {**BODY, **fields}} == {**BODY, **fields}


def test_log_probabilities_of_the_prompt_are_those_of_the_first_server() -> None:
    output = Output({**BODY, "return_logprob": True, "logprob_start_len": 0})
    first = chunk(0, 0, 0, 3, False, [])
    first["meta_info"]["input_token_logprobs"] = [[None, 7, None]]
    output.take(first, url(0))
    output.move(url(0), "killed")
    assert "logprob_start_len" not in output.next_body()
    second = chunk(1, 3, 0, 5, False, first["meta_info"]["weight_versions"])
    second["meta_info"]["input_token_logprobs"] = []
    output.take(second, url(1))
    assert output.answer(url(1))["meta_info"]["input_token_logprobs"] == [[None, 7, None]]


def test_samples_and_prompts_are_requests_of_their_own() -> None:
    assert split(BODY) is None
    assert split({"text": "a"}) is None
    body = {
        "input_ids": [[1], [2]],
        "rid": "r",
        "sampling_params": {"n": 2, "sampling_seed": 7},
        "lora_path": ["a", None],
        "stream": False,
    }
    parts = split(body)
    assert parts is not None
    assert [part["input_ids"] for part in parts] == [[1], [1], [2], [2]]
    assert [part["rid"] for part in parts] == ["r_0", "r_1", "r_2", "r_3"]
    assert [part["lora_path"] for part in parts] == ["a", "a", None, None]
    assert [part["sampling_params"] for part in parts] == [
        {"n": 1, "sampling_seed": seed} for seed in (7, 8, 7, 8)
    ]
    assert [part["text"] for part in split({"text": ["a", "b"]}) or ()] == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "served", "expected"),
    [
        ({}, None, set()),
        ({}, "v1", {"v1"}),
        ({"exact_weight_version": "v2"}, "v1", {"v2"}),
        ({"sampling_params": {"custom_params": {"weight_version": "v3"}}}, None, {"v3"}),
        ({"sampling_params": {"custom_params": {"min_weight_version": 3}}}, "v4", {"v4"}),
    ],
)
def test_next_server_has_the_contracts_version(
    fields: dict[str, Any], served: str | None, expected: set[str]
) -> None:
    assert versions_of_contract(fields, served) == expected


class _Client:
    def __init__(self, url: str) -> None:
        self.url = url


def servers(count: int) -> Servers:
    clients: Any = [_Client(url(n)) for n in range(count)]
    return Servers(clients)


def test_rollouts_of_one_prompt_share_a_server_until_it_is_busy() -> None:
    three, prompt = servers(3), list(range(200))
    first = three.choose(prompt, (), ())
    assert first is not None
    chosen = []
    for _ in range(8):
        place = three.choose([*prompt, 1], (), ())
        assert place is not None
        place.requests += 1
        chosen.append(place.url)
    assert chosen[:5] == [first.url] * 5
    assert set(chosen) != {first.url}


def test_server_that_is_not_ready_is_not_chosen() -> None:
    three = servers(3)
    three.places[url(0)].why_not = "it drains"
    place = three.choose(None, (), {url(1)})
    assert place is not None
    assert place.url == url(2)
    assert three.choose(None, (), {url(1), url(2)}) is None
