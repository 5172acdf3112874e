"""The plan of a repetition, from a record's events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_inflight.client.spans import Span
from sglang_inflight.extensions.replay.compare import (
    Difference,
    compare,
    first_difference,
    mismatch,
)
from sglang_inflight.extensions.replay.play import (
    Played,
    Stop,
    added_prefills,
    prefills,
    stops,
    without_added,
)
from sglang_inflight.extensions.replay.rollout import Record, Rollout, read_rollouts
from sglang_inflight.extensions.replay.script import read_script
from sglang_inflight.extensions.replay.start import arguments_of, environment_of
from sglang_inflight.extensions.trails.prompts import digest_of
from sglang_inflight.vocabulary.errors import Refused

PROMPT = [5, 6, 7]
COMMIT, RETRACT, PREFILL = "commit", "retract", "prefill"


def record(events: list[list[Any]], **fields: Any) -> Record:
    weights: dict[str, tuple[str, str | None]] = {str(e): (f"v{e}", None) for e in range(4)}
    return Record(
        **{
            "prompt": digest_of(PROMPT),
            "sampling": {},
            "adapter": None,
            "epoch": 0,
            "events": events,
            "weights": weights,
            "server": {},
            **fields,
        }
    )


def rollout(
    tokens: list[int],
    logprobs: list[float] | None,
    events: list[list[Any]] | None = None,
    kv: list[Span] | None = None,
) -> Rollout:
    made_by = [Span("v0", 0, len(tokens), 0)]
    events = [[PREFILL, 0, 3]] if events is None else events
    rows = {"routed_experts": "AAAA"}
    return Rollout("a", PROMPT, tokens, logprobs, made_by, kv or [], [], record(events), rows)


def played(like: Rollout, tokens: list[int], logprobs: list[float], **fields: Any) -> Played:
    same: dict[str, Any] = {
        "made_by": like.made_by,
        "kv": like.kv,
        "events": like.record.events,
        "rows": like.rows,
        "notes": [],
    }
    return Played(tokens, logprobs, **(same | fields))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([[PREFILL, 0, 3]], []),
        ([[PREFILL, 0, 3], [COMMIT, 7, 1]], [(0, 7, [COMMIT])]),
        (
            [[PREFILL, 0, 3], [COMMIT, 7, 1], [COMMIT, 7, 2], [COMMIT, 8, 3]],
            [(0, 7, [COMMIT, COMMIT]), (0, 8, [COMMIT])],
        ),
        # a commit that recomputes retracts first
        (
            [[PREFILL, 0, 3], [RETRACT, 7, []], [COMMIT, 0, 1], [PREFILL, 0, 8]],
            [(0, 7, [RETRACT, COMMIT])],
        ),
        (
            [[PREFILL, 0, 3], [COMMIT, 7, 1], [RETRACT, 7, []], [PREFILL, 3, 8], [COMMIT, 9, 2]],
            [(0, 7, [COMMIT, RETRACT]), (1, 9, [COMMIT])],
        ),
        # the second run comes to the same position again
        (
            [[PREFILL, 0, 3], [RETRACT, 7, []], [PREFILL, 0, 8], [RETRACT, 7, []], [PREFILL, 0, 8]],
            [(0, 7, [RETRACT]), (1, 7, [RETRACT])],
        ),
    ],
)
def test_repetition_pauses_where_something_happened(
    events: list[list[Any]], expected: list[tuple[int, int, list[str]]]
) -> None:
    found = [
        (s.retractions, s.position, [event[0] for event in s.events]) for s in stops(events, {})
    ]
    assert found == expected
    assert all(isinstance(stop, Stop) for stop in stops(events, {}))


def test_repetition_forgets_prefixes_that_the_rollout_did_not_find() -> None:
    events = [
        [PREFILL, 0, 3], [COMMIT, 5, 1], [RETRACT, 7, []], [COMMIT, 0, 2], [PREFILL, 0, 8],
        [COMMIT, 9, 3], [RETRACT, 11, []], [PREFILL, 10, 12],
    ]  # fmt: skip
    assert [stop.forgets for stop in stops(events, {})] == [False, True, False, False]


def test_repetition_has_the_recorded_prefills() -> None:
    events = [[PREFILL, 2, 512], [PREFILL, 512, 600], [RETRACT, 620, []], [PREFILL, 0, 621]]
    assert prefills(events, {}) == [[2, 512], [512, 600], [0, 621]]


def of_others(versions: list[str]) -> Rollout:
    """Return a rollout that was retracted at 6, under v0, and found KV by ``versions``."""
    events = [[PREFILL, 0, 3], [COMMIT, 5, 1], [RETRACT, 6, []], [PREFILL, len(versions), 7]]
    kv = [Span(version, at, at + 1) for at, version in enumerate([*versions, "v1"])]
    return rollout([1], None, events, kv)


@pytest.mark.parametrize(
    ("versions", "added"),
    [
        (["v0", "v0", "v0"], {}),
        (["v0", "v0", "v0", "v0", "v0", "v1"], {}),
        (["v1", "v1"], {3: 2}),
        ([], {}),
    ],
)
def test_repetition_computes_kv_that_another_request_had_made(
    versions: list[str], added: dict[int, int]
) -> None:
    found = of_others(versions)
    events = found.record.events
    assert added_prefills(found) == added
    made = prefills(events, added)
    assert made == [[0, 3], *[[0, end] for end in added.values()], [len(versions), 7]]
    assert stops(events, added)[-1].forgets == (bool(added) or not versions)
    played = [[PREFILL, *made[0]], *events[1:3], *([PREFILL, *each] for each in made[1:])]
    assert without_added(played, events, added) == events


def test_kv_of_another_request_by_other_weights_is_refused() -> None:
    with pytest.raises(Refused, match=r"a found KV of another request .* v0, v1 had made"):
        added_prefills(of_others(["v1", "v0"]))


def test_prefix_of_a_retracted_rollout_is_that_of_its_first_prefill() -> None:
    events = [[PREFILL, 2, 3], [RETRACT, 7, [["v7", 7, 2]]], [PREFILL, 0, 8]]
    assert rollout([1], None, events).prefix == [("v7", 7, 2)]


def test_prefix_ends_where_the_prefill_began() -> None:
    kv = [Span("v7", 0, 1, 7), Span("v8", 1, 9, 8)]
    assert rollout([1], None, [[PREFILL, 2, 3]], kv).prefix == [("v7", 7, 1), ("v8", 8, 2)]
    assert rollout([1], None, [[PREFILL, 0, 3]], kv).prefix == []


def test_first_difference_counts_missing_tokens() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([], [1]) == 0


def test_equal_repetition_is_exact() -> None:
    like = rollout([1, 2], [-0.5, -0.25])
    verdict = compare(like, played(like, [1, 2], [-0.5, -0.25]), None, 0.0)
    assert verdict.is_equal
    assert verdict.is_exact
    assert str(verdict) == "equal, bit for bit"


def test_verdict_names_the_first_other_token() -> None:
    like = rollout([1, 2, 3], [-0.5, -0.25, -1.0])
    forced = played(like, [1, 2, 3], [-0.5, -0.75, -1.125])
    verdict = compare(like, played(like, [1, 4, 5], [-0.5, -9.0, -9.0]), forced, 1.0)
    assert not verdict.is_equal
    assert verdict.first == 1
    assert verdict.largest == Difference(1, 0.5)
    assert str(verdict) == "differs at token 1; at most 0.5 nats apart (token 1)"


@pytest.mark.parametrize(("tolerance", "apart"), [(0.0, 1), (0.2, 2), (0.3, None)])
def test_verdict_names_the_first_other_log_probability(tolerance: float, apart: int) -> None:
    like = rollout([1, 2, 3], [-0.5, -0.25, -1.0])
    verdict = compare(like, played(like, [1, 2, 3], [-0.5, -0.375, -1.25]), None, tolerance)
    assert verdict.first_apart == apart
    assert verdict.is_equal == (apart is None)
    assert not verdict.is_exact


def test_log_probability_that_is_no_number_is_no_equal_one() -> None:
    like = rollout([1], [-0.5])
    assert compare(like, played(like, [1], [float("nan")]), None, 1.0).first_apart == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"made_by": [Span("v0", 0, 1), Span("v1", 1, 2)]},
            "token 1 was made by 'v0', and by 'v1'",
        ),
        ({"kv": [Span("v1", 0, 4)]}, "the KV of position 0 was made by 'v0', and by 'v1'"),
        ({"events": [[PREFILL, 1, 3]]}, "event 0 was ['prefill', 0, 3], and ['prefill', 1, 3]"),
        ({"rows": {"routed_experts": "AAAB"}}, "routed_experts differ"),
        ({"notes": ["version 'v1' had other weights"]}, "version 'v1' had other weights"),
    ],
)
def test_equal_tokens_of_another_making_are_no_equal_rollout(
    fields: dict[str, Any], said: str
) -> None:
    like = rollout([1, 2], [-0.5, -0.25], kv=[Span("v0", 0, 4)])
    verdict = compare(like, played(like, [1, 2], [-0.5, -0.25], **fields), None, 0.0)
    assert not verdict.is_equal
    assert said in str(verdict)


def test_epochs_of_a_repetition_may_have_other_numbers() -> None:
    like = rollout([1], [-0.5], [[PREFILL, 0, 3], [COMMIT, 3, 41]])
    other = played(like, [1], [-0.5], events=[[PREFILL, 0, 3], [COMMIT, 3, 2]])
    assert compare(like, other, None, 0.0).is_equal


def test_mismatch_is_by_version() -> None:
    first, second = mismatch(["a", "b", "a"], [0.0, -1.0, -2.0], [-0.5, -1.0, -1.0])
    assert (first.version, first.tokens, first.mean, first.largest) == ("a", 2, 0.75, 1.0)
    assert first.ratio_variance == pytest.approx(((2.718281828 - 0.60653066) / 2) ** 2)
    assert second[1:] == (1, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("sampling", "arguments", "alike"),
    [
        ({}, {}, False),
        ({"temperature": 0}, {}, True),
        ({"top_k": 1}, {}, True),
        ({"sampling_seed": 3}, {}, False),
        ({"sampling_seed": 3}, {"enable_deterministic_inference": True}, True),
    ],
)
def test_rollout_is_sampled_again_only_if_logits_decide(
    sampling: dict[str, Any], arguments: dict[str, Any], alike: bool
) -> None:
    found = record([], sampling=sampling, server={"arguments": arguments})
    assert found.samples_alike is alike


def test_server_is_started_with_recorded_arguments() -> None:
    given = {"tp_size": 2, "enable_mixed_chunk": True, "disable_radix_cache": False, "dtype": None}
    assert arguments_of({"arguments": given}) == ("--enable-mixed-chunk", "--tp-size", "2")


def test_server_is_started_with_the_recorded_environment() -> None:
    given = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    assert environment_of({"environment": given}) == given
    assert environment_of({}) == {}


@pytest.mark.parametrize(
    "script",
    [[], {"pauses": [[1]]}, {"pauses": [[0, -1]]}, {"prefills": 3}, {"others": []}],
)
def test_wrong_script_is_refused(script: Any) -> None:
    with pytest.raises(ValueError, match=r"Expected|Object"):
        read_script(script)


def answer(**fields: Any) -> dict[str, Any]:
    described = {
        "prompt": digest_of(PROMPT),
        "sampling": {},
        "adapter": None,
        "epoch": 0,
        "events": [[PREFILL, 0, 3]],
        "weights": {"0": ["v0", None]},
        "server": {},
    }
    meta = {
        "replay": described,
        "weight_versions": [{"version": "v0", "epoch": 0, "start": 0, "end": 2}],
        "output_token_logprobs": [[-0.5, 8, None], [-0.25, 9, None]],
    }
    return {"output_ids": [8, 9], "prompt_token_ids": PROMPT, "meta_info": meta, **fields}


def test_files_of_each_form_are_read(tmp_path: Path) -> None:
    alone, request = answer(), {"input_ids": PROMPT}
    without = {name: value for name, value in alone.items() if name != "prompt_token_ids"}
    (tmp_path / "a.json").write_text(json.dumps(alone))
    (tmp_path / "b.jsonl").write_text(f"{json.dumps(alone)}\n\n{json.dumps(alone)}\n")
    (tmp_path / "c.json").write_text(json.dumps({"request": request, "answer": [without, alone]}))
    (tmp_path / "other.txt").write_text("no answer")
    found = read_rollouts(tmp_path)
    assert [each.name for each in found] == [
        "a.json", "b.jsonl:0", "b.jsonl:1", "c.json[0]", "c.json[1]",
    ]  # fmt: skip
    for each in found:
        assert (each.prompt, each.tokens, each.logprobs) == (PROMPT, [8, 9], [-0.5, -0.25])


def choice(logprobs: Any, **fields: Any) -> dict[str, Any]:
    """Return a choice of vLLM's or OpenAI's routes."""
    meta = answer()["meta_info"]
    names = ("replay", "weight_versions")
    return {"token_ids": [8, 9], "logprobs": logprobs, **{n: meta[n] for n in names}, **fields}


@pytest.mark.parametrize(
    ("logprobs", "fields", "expected"),
    [
        ({"content": [{"logprob": -0.5}, {"logprob": -0.25}]}, {}, [-0.5, -0.25]),
        ({"token_logprobs": [-0.5, -0.25]}, {}, [-0.5, -0.25]),
        (None, {}, None),
        # log probabilities over a mask are none of all tokens
        ({"content": [{"logprob": 0.0}, {"logprob": 0.0}]}, {"sampling_mask": [[8], [9]]}, None),
    ],
)
def test_choices_are_rollouts(
    tmp_path: Path, logprobs: Any, fields: dict[str, Any], expected: list[float] | None
) -> None:
    file = tmp_path / "a.json"
    choices = [choice(logprobs, **fields), choice(logprobs, **fields)]
    body = {"request": {"token_ids": PROMPT}, "answer": {"choices": choices}}
    file.write_text(json.dumps(body))
    found = read_rollouts(file)
    assert [each.name for each in found] == ["a.json[0]", "a.json[1]"]
    assert [(each.tokens, each.logprobs) for each in found] == [([8, 9], expected)] * 2


def test_rollout_that_moved_between_adapters_is_refused(tmp_path: Path) -> None:
    moved = answer()
    moved["meta_info"]["adapter_versions"] = [
        {"adapter": "a", "version": version, "start": at, "end": at + 1}
        for at, version in enumerate(("4", "5"))
    ]
    file = tmp_path / "a.json"
    file.write_text(json.dumps(moved))
    with pytest.raises(Refused, match=r"a\.json moved from adapter version '4' to '5'"):
        read_rollouts(file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("7", "has no record"),
        (json.dumps(answer(meta_info={})), "has no record"),
        (json.dumps(answer(prompt_token_ids=None)), "lacks the prompt's tokens"),
        (json.dumps(answer(prompt_token_ids=[5, 6, 8])), "another prompt"),
        (json.dumps(answer(meta_info={"replay": {}})), "malformed record"),
        (json.dumps(answer(output_ids=None)), "lacks the output's tokens"),
        (json.dumps({"choices": [7]}), "has no record"),
    ],
)
def test_unusable_file_is_refused_by_name(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(Refused, match=said) as caught:
        read_rollouts(tmp_path / "a.json")
    assert "a.json" in str(caught.value)


def test_folder_without_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no \.json"):
        read_rollouts(tmp_path)
